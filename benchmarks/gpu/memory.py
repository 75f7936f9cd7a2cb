"""Memory and waiting: the sentence of a full GPU, what jobs leave behind, and what waits for the GPU in a step."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import report
from benchmarks.gpu import card
from benchmarks.gpu.bench import SHORT, Bench, Broken
from benchmarks.report import Figure, Goal
from ddp_hydra.rank import fork_client

NONE = Goal(0, at_most=True)
FEW_MIB = Goal(64, at_most=True)
"""Less than a CUDA context, which takes some hundred MiB."""
LENGTH = ("trainer.max_steps=20", "trainer.epochs=null", "data.val=null")
GIVEN_BACK_S = 10.0


def full(bench: Bench) -> Iterator[Figure]:
    """Ask for more memory than there is: one sentence says what to lower."""
    huge = ("model._target_=benchmarks.gpu.probes.Huge", *LENGTH, *bench.ranks(1), "dispatch.max_restarts=0")
    job = bench.job("full", *SHORT, *huge, ends=1)
    sentence = rf"no memory left on {bench.device}(:0)? in step 1, phase forward: .*data\.batch_size=16"
    said = re.search(sentence, job.output, re.DOTALL) is not None and "Traceback" not in job.output
    yield report.value("a full GPU: the sentence that names step, phase and what to lower", int(said), Goal(1))


def given_back(bench: Bench) -> Iterator[Figure]:
    """Run jobs one after the other next to a warm fork server: each gives back all that it took."""
    settings = (*SHORT, *LENGTH, *bench.ranks(bench.card.gpus or 1))
    bench.job("warm", *settings)
    before = sum(settled())
    for number in range(3):
        bench.job(f"again-{number}", *settings)
    yield report.value("memory that three jobs leave on the GPUs", max(0, sum(settled()) - before), FEW_MIB, "MiB")


def settled() -> list[int]:
    """Return the memory in use, once it no longer falls."""
    last, deadline = card.memory_used_mib(), time.monotonic() + GIVEN_BACK_S
    while time.monotonic() < deadline:
        time.sleep(1)
        now = card.memory_used_mib()
        if sum(now) >= sum(last):
            return now
        last = now
    return last


def server_files(bench: Bench) -> Iterator[Figure]:
    """Look at the fork server after a job: it has torch imported, and no GPU open."""
    bench.job("warm", *SHORT, *LENGTH, *bench.ranks(1))
    servers = warm_servers(bench)
    yield report.value("fork servers that stay warm after a job", len(servers), Goal(1))
    opened = sum(len(device_files(pid)) for pid in servers)
    yield report.value("GPU files that they have open", opened, NONE)


def warm_servers(bench: Bench) -> list[int]:
    """Return the process ids of the fork servers of this report's jobs."""
    sockets = Path(bench.variables["XDG_RUNTIME_DIR"]).rglob("*.sock")
    found = [fork_client.ask(path, "status") for path in sockets]
    return [int(status["pid"]) for status in found if status]


def device_files(pid: int) -> list[str]:
    """Return the files of GPUs that a process has open."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return [link for link in links if link.startswith("/dev/nvidia")]


def waits(bench: Bench) -> Iterator[Figure]:
    """Count what waits for the GPU in a step, as torch itself counts it, without and with a moving average."""
    quiet = ("trainer.log_every_steps=100", "trainer.max_steps=30", "trainer.epochs=null", "data.val=null")
    for name, ema in (("without", "null"), ("with", "0.9")):
        told = bench.new_folder("waits.json")
        watched = ("model._target_=benchmarks.gpu.probes.Watched", f"+model.file={told}", f"trainer.ema_decay={ema}")
        bench.job("waits", *SHORT, *watched, *quiet, *bench.ranks(1))
        if not told.is_file():
            raise Broken("the model never counted: too few steps")
        found = json.loads(told.read_text())
        for where in sorted(set(found["where"])):
            report.progress(
                f"waits for the GPU: {where}, {found['where'].count(where)} times in {found['steps']} steps"
            )
        per_step = len(found["where"]) / found["steps"]
        yield report.value(f"waits for the GPU in a step, {name} EMA", per_step, NONE)
