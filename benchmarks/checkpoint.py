"""Measures checkpoints: how long training stands still, the memory of a resume, and what a disk gives of its speed.

Writes end when the disk has them and the manifest names them; reads begin with nothing in the page cache. `torch.save`,
plain DCP and bare files do the same in turn.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks import commands, report
from benchmarks.report import Figure, Goal
from ddp_hydra import heartbeat, results
from ddp_hydra.dispatch import inline
from ddp_hydra.rank.world import World
from ddp_hydra.training import checkpoint, sharded_checkpoint
from ddp_hydra.training.callbacks import Callback, RunView
from ddp_hydra.training.lr_schedules import constant
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.state import Position, TrainingState
from ddp_hydra.writers.files import CheckpointWriter

LAYERS = 32
"""Of 1,024 x 1,024: with Adam's state, 12 MiB each."""
STEPS, EVERY = 120, 20
JOB = (
    *("data=bench", "data.batch_size=8", "data.train._target_=benchmarks.workloads.Images", "scheduler=none"),
    *("objective.metric=train/loss", "objective.direction=minimize", "trainer.validate_every_epochs=0"),
    *("model=resnet18", "optimizer=adamw", "optimizer.fused=false", "trainer.threads=1", "trainer.channels_last=false"),
)
FORMS = {"one file": (1, "trainer.shard_above_gb=null"), "in parts": (2, "trainer.shard_above_gb=0")}
"""Ranks and setting. On two cores, one rank leaves a core for its save, and two don't."""


class Steps(Callback):
    """Writes down how long training stood still for each save, the time of each step, and the largest memory.

    Args:
        folder: where to write.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.stalls, self.rows = Path(folder), [], []

    def on_start(self, run: RunView) -> None:
        """Note what the start took, and time all saves."""
        self.peak, saver = peak_bytes(), run._run.checkpoints
        save = saver.save

        def timed(*args: Any) -> None:
            begin = time.perf_counter()
            save(*args)
            self.stalls.append(time.perf_counter() - begin)

        saver.save = timed

    def on_step(self, run: RunView) -> None:
        """Note the time, and whether a save is under way."""
        self.rows.append((time.perf_counter(), heartbeat.here().saving))

    def on_end(self, run: RunView) -> None:
        """Write all down."""
        found = {"stalls": self.stalls, "rows": self.rows, "peak": self.peak}
        (self.folder / f"rank-{run.rank}.json").write_text(json.dumps(found))


def peak_bytes() -> int:
    """Return the most memory that this process had."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def measure(repeats: int) -> Iterator[Figure]:
    """Measure all in turns."""
    yield from stalls(repeats)
    yield resumed()
    yield from speeds(repeats)


def stalls(repeats: int) -> Iterator[Figure]:
    """Train ResNet-18 with AdamW, 128 MiB of state, and save it each few steps."""
    for form, (ranks, setting) in FORMS.items():
        calm_s, stalled, slower = [], [], []
        for _ in range(repeats):
            found = job(ranks, setting, f"trainer.checkpoint_every_steps={EVERY}", f"trainer.max_steps={STEPS}")
            took = [(b - a, before or after) for (a, before), (b, after) in itertools.pairwise(found["rows"][10:])]
            calm, saving = ([s for s, is_saving in took if is_saving is kind] for kind in (False, True))
            calm_s.append(step := statistics.median(calm))
            stalled.append(statistics.median(found["stalls"]) / step)
            slower.append(p95(saving or calm) / p95(calm))
            report.progress(f"{form}: a step {step:.4f} s, {len(saving)} steps during saves of {len(took)}")
        what = f"{form}, {ranks} rank{'s' * (ranks > 1)}"
        yield report.times(f"{what}: a step of ResNet-18", calm_s)
        yield report.times(f"{what}: stall by a save / a step", stalled, Goal(1.0, at_most=True), unit="x")
        goal = Goal(1.05, at_most=True) if ranks == 1 else None
        yield report.times(f"{what}: p95 of steps during a save / p95 of others", slower, goal, unit="x")


def p95(values: list[float]) -> float:
    """Return the time that one in twenty exceeds."""
    return sorted(values)[int(0.95 * (len(values) - 1))]


def resumed() -> Figure:
    """Resume the same run, sharded: the largest rank, without what a rank takes that begins anew."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run_dir = Path(folder) / "run"
        fresh = job(2, "trainer.shard_above_gb=0", "trainer.max_steps=2", run_dir=run_dir)["peak"]
        files = [path.stat().st_size for path in run_dir.glob("checkpoints/step-*/*.distcp")]
        goes_on = job(2, "trainer.shard_above_gb=0", "trainer.max_steps=4", f"resume={run_dir}")["peak"]
    report.progress(f"a rank {fresh / 2**20:.0f} MiB, resumed {goes_on / 2**20:.0f} MiB, files {files}")
    share = sum(files) / len(files)
    return report.value(
        "memory that a resume takes / a share and one file", (goes_on - fresh) / (share + max(files)), Goal(1.0, True)
    )


def job(ranks: int, *overrides: str, run_dir: Path | None = None) -> dict[str, Any]:
    """Run a job; return what its rank 0 wrote down, and of all ranks the largest memory."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, commands.nobody_warm() as variables:
        steps = f"+callbacks.steps={{_target_: benchmarks.checkpoint.Steps, folder: {folder}}}"
        words = (*JOB, f"cluster.n_workers={ranks}", "parallel=fsdp2", "data.train.n_samples=16000", *overrides, steps)
        commands.run(commands.job(*words, run_dir=run_dir or Path(folder) / "run"), variables)
        told = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return {**told[0], "peak": max(one["peak"] for one in told)}


# -- the disk ------------------------------------------------------------------------------------------------


def speeds(repeats: int) -> Iterator[Figure]:
    """Write and read a state of 384 MiB in one process, in each way."""
    state = made()
    tensors = sharded_checkpoint.taken_apart(state.begin_capture()())[1]
    size = sum(tensor.nbytes for tensor in tensors.values())
    took: dict[str, dict[str, list[float]]] = {"write": {}, "read": {}}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World(group=dist.group.WORLD, cpu_group=dist.group.WORLD)
    ways: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
        "bare files": (partial(write_bare, tensors), partial(read_bare, tensors)),
        "torch.save": (partial(write_torch, tensors), lambda folder: torch.load(folder / "a.pt", weights_only=True)),
        "plain DCP": (partial(write_dcp, tensors), partial(read_dcp, tensors)),
        "one file": (partial(write_ours, state, World(), None), read_ours),
        "in parts": (partial(write_ours, state, world, 0.0), read_ours),
    }
    for _, (name, (write, read)) in itertools.product(range(repeats), ways.items()):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for what, act in (("write", write), ("read", read)):
                drop_cache(Path(folder))
                begin = time.perf_counter()
                act(Path(folder))
                took[what].setdefault(name, []).append(size / (time.perf_counter() - begin) / 1e9)
                report.progress(f"{what}, {name}: {took[what][name][-1]:.2f} GB/s")
    dist.destroy_process_group()
    for what, by_way in took.items():
        for name, runs in by_way.items():
            yield Figure(f"{what}, {name}", statistics.median(runs), max(runs), min(runs), "GB/s", runs=tuple(runs))
        for name, peer in (("one file", "torch.save"), ("in parts", "plain DCP")):
            yield report.paired(f"{what}, {name} / bare files", by_way[name], by_way["bare files"], Goal(0.8))
            yield report.paired(f"{what}, {name} / {peer}", by_way[name], by_way[peer])


def made() -> TrainingState:
    """Return the state of a model with Adam."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1024)).sum().backward()
    optimizer.step()
    return TrainingState(Parallel().adopt(model), optimizer, constant(optimizer, 1), Position(), {})


def write_bare(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the bytes of all tensors into a file."""
    with (folder / "a").open("wb", buffering=0) as file:
        for tensor in tensors.values():
            file.write(memoryview(tensor.numpy()).cast("B"))
        os.fsync(file.fileno())


def read_bare(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Read them into memory, which all keep."""
    found = [torch.empty_like(tensor) for tensor in tensors.values()]
    with (folder / "a").open("rb", buffering=0) as file:
        for tensor in found:
            file.readinto(memoryview(tensor.numpy()).cast("B"))


def write_torch(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a file of torch's."""
    with (folder / "a.pt").open("wb") as file:
        torch.save(tensors, file)
        os.fsync(file.fileno())


def write_dcp(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a folder of DCP's, which syncs its files."""
    dcp.save(dict(tensors), checkpoint_id=folder / "dcp")


def read_dcp(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Read it."""
    dcp.load({name: torch.empty_like(tensor) for name, tensor in tensors.items()}, checkpoint_id=folder / "dcp")


def write_ours(state: TrainingState, world: World, shard_above_gb: float | None, folder: Path) -> None:
    """Save it as a rank does, and store it as the client does."""
    for name in ("spool", "run"):
        (folder / name).mkdir()
    writer = CheckpointWriter(folder / "run", inline.fetch)
    results.connect(inline.DirectSender(writer.write, folder / "spool"))
    saver = checkpoint.CheckpointSaver(world, shard_above_gb)
    saver.save(state, {}, best=False)
    saver.wait()
    results.connect(None)
    writer.close()


def read_ours(folder: Path) -> None:
    """Read it into memory, all of it: one file is mapped until it is used."""
    (path,) = (folder / "run" / "checkpoints").glob("step-*")
    found = sharded_checkpoint.taken_apart(checkpoint.read(path))[1]
    if path.is_file():
        found = {name: tensor.clone() for name, tensor in found.items()}


def drop_cache(folder: Path) -> None:
    """Leave nothing of a folder's files in the page cache, and nothing for the disk to do."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("it reads /proc")
    report.main(__doc__ or "", measure, repeats=3)
