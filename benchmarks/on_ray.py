"""Start of a gang and samples/s on a Ray that is up, compared with Ray Train on the same Ray."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import commands, environments, overhead, report
from benchmarks.overhead import RANKS, WORK, Work
from benchmarks.report import Figure, Goal
from benchmarks.train import PEERS, RAY, run, sizes
from ddp_hydra.rank.environment import ALLOCATOR

HOST = "127.0.0.1"
START_S = 120.0
"""Seconds that Ray may take to start."""
SIDES = ("ddp_hydra", "Ray Train")
IN_MEMORY = WORK[:2]
"""The works that `peers/ray_loop.py` knows."""


def measure(repeats: int) -> Iterator[Figure]:
    """Start gangs, then train, by each side in turn."""
    in_environment_of_ray()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, a_ray(Path(folder)) as ray:
        starts: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(repeats):
            for side in SIDES[:: -1 if turn % 2 else 1]:
                starts[side] += first_steps(side, ray, Path(folder) / "stamp")
                report.progress(f"{side}: first step after {', '.join(f'{one:.2f}' for one in starts[side][-3:])} s")
        ours, theirs = (report.times(f"{side} on a warm Ray, {RANKS} ranks", starts[side]) for side in SIDES)
        yield from (ours, theirs)
        yield report.ratio("first step: Ray Train / ddp_hydra", theirs, ours, Goal(10))
        for work in IN_MEMORY:
            yield from speeds(work, ray, repeats)


def speeds(work: Work, ray: dict[str, str], repeats: int) -> Iterator[Figure]:
    """Train one work by both sides."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    name = f"{work.model} x {work.batch_size}"
    for turn in range(repeats):
        for side in SIDES[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                train = by_us if side == SIDES[0] else by_ray
                found[side].append(train(work, ray, Path(folder)))
            report.progress(f"{name}, {side}: {found[side][-1]:,.1f} samples/s")
    for side in SIDES:
        yield report.speeds(f"{name}, {side}", found[side])
    yield report.paired(f"{name}: ddp_hydra / Ray Train", found[SIDES[0]], found[SIDES[1]], Goal(1.0))


def by_us(work: Work, ray: dict[str, str], folder: Path) -> float:
    """Samples/s of `python -m ddp_hydra cluster=ray`."""
    os.environ.update(ray)  # for the command
    return overhead.job(work, folder, (*overhead.in_memory(work), *on_ray(ray)))


def by_ray(work: Work, ray: dict[str, str], folder: Path) -> float:
    """Samples/s of the loop by hand under Ray Train."""
    script = str(commands.ROOT / "benchmarks" / "peers" / "ray_loop.py")
    os.environ.update(ray)
    return run([sys.executable, script, *sizes(work, folder)], work, folder)


def on_ray(ray: dict[str, str]) -> tuple[str, ...]:
    """Return the overrides that choose the Ray."""
    return "cluster=ray", f"cluster.address={ray['RAY_ADDRESS']}"


def first_steps(side: str, ray: dict[str, str], stamp: Path) -> list[float]:
    """Connect to Ray in a new process, start a gang to get warm, then three more; return their seconds."""
    script = "ray_first_step.py" if side == SIDES[1] else "our_first_step_on_ray.py"
    command = [sys.executable, str(commands.ROOT / "benchmarks" / "peers" / script), str(stamp), str(RANKS)]
    variables = commands.with_ours({**commands.ONE_THREAD, **ALLOCATOR, **RAY, **ray})
    done = subprocess.run(command, cwd=commands.ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return [float(one) for one in json.loads(done.stdout.splitlines()[-1])]


@contextmanager
def a_ray(folder: Path) -> Iterator[dict[str, str]]:
    """Start a Ray of one node on this machine; yield the variables by which a program finds it."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        address = f"{HOST}:{free.getsockname()[1]}"
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    options = (f"--port={address.rpartition(':')[2]}", f"--node-ip-address={HOST}", f"--num-cpus={RANKS}")
    limits = (f"--object-store-memory={80 * 2**20}", "--include-dashboard=false", f"--temp-dir={folder}")
    ray = (sys.executable, "-m", "ray.scripts.scripts")  # the command may be in the environment below this one
    command = [*ray, "start", "--head", "--block", *options, *limits]
    variables = commands.with_ours({**RAY, **ALLOCATOR, **secret, "XDG_RUNTIME_DIR": str(folder)})
    log = folder / "ray.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(command)}\n{log.read_text()[-4000:]}")
            time.sleep(0.1)
        yield {**secret, "RAY_ADDRESS": address}
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def in_environment_of_ray() -> None:
    """Go on in the environment of the peers, so that both sides and the Ray are of one version."""
    variable = "BENCH_ON_RAY"
    if variable not in os.environ:
        python = environments.python("train", *PEERS)
        here = commands.with_ours({variable: "1"})
        os.execve(python, [python, "-m", "benchmarks.on_ray", *sys.argv[1:]], here)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves nothing behind, like Ctrl-C
    report.main(__doc__, measure, repeats=3)
