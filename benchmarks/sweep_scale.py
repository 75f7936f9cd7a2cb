"""Measures what a sweep of 500 tiny jobs holds after 50 jobs and at its end: memory, descriptors, disk, CPU time."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import commands, report
from benchmarks.report import Figure, Goal

JOBS = 500
EARLY = 50
"""The jobs after which the first figures are taken."""
GROWTH = Goal(10.0, at_most=True)
"""MiB that a process may grow from the early jobs to the last."""


@dataclass(frozen=True)
class Held:
    """Holds what a sweep holds at one moment.

    Args:
        jobs: that have ended.
        at_s: since the command, in seconds.
        sweep_mib: memory of the process of the sweep.
        scheduler_mib: memory of the process of the scheduler.
        sweep_fds: open file descriptors of the process of the sweep.
        scheduler_fds: open files of the scheduler's process.
        cpu_s: CPU time of the process of the sweep, without its children.
        disk_bytes: space that the folder of the sweep takes.
    """

    jobs: int
    at_s: float
    sweep_mib: float
    scheduler_mib: float
    sweep_fds: int
    scheduler_fds: int
    cpu_s: float
    disk_bytes: int


def measure(repeats: int) -> Iterator[Figure]:
    """Run the sweep, and compare what it holds early with what it holds at its end."""
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            found.append(watched(Path(name) / "sweep"))

    def of(name: str, field: str, unit: str, goal: Goal | None = None) -> Iterator[Figure]:
        values = [tuple(float(getattr(held, field)) for held in pair) for pair in found]
        yield report.times(f"{name}, {EARLY} jobs", [early for early, _ in values], unit=unit)
        yield report.times(f"{name}, {JOBS} jobs", [late for _, late in values], unit=unit)
        if goal is not None:
            yield report.times(f"{name}, growth", [late - early for early, late in values], goal, unit=unit)

    yield from of("memory of the sweep", "sweep_mib", "MiB", GROWTH)
    yield from of("memory of the scheduler", "scheduler_mib", "MiB", GROWTH)
    yield from of("descriptors of the sweep", "sweep_fds", "")
    yield from of("descriptors of the scheduler", "scheduler_fds", "")
    for name, field, factor, unit in (
        ("time of a job", "at_s", 1.0, "s"),
        ("CPU time of the sweep's process for a job", "cpu_s", 1000.0, "ms"),
        ("disk of a job", "disk_bytes", 1 / 1024, "KiB"),
    ):
        for label, values in (
            (f"the first {EARLY}", [getattr(early, field) / early.jobs * factor for early, _ in found]),
            (
                "the others",
                [
                    (getattr(late, field) - getattr(early, field)) / (late.jobs - early.jobs) * factor
                    for early, late in found
                ],
            ),
        ):
            yield report.times(f"{name}, {label}", values, unit=unit)


def watched(folder: Path) -> tuple[Held, Held]:
    """Run a sweep, and return what it holds early and at its end."""
    command = [
        sys.executable, "-m", "ddp_hydra", "-m", commands.CONF, "cluster.n_workers=2", "dispatch.ranks=1", "data=bench",
        "data.train.n_samples=64", "data.batch_size=16", "model=mlp", "trainer.max_steps=4", "trainer.threads=1",
        "objective.metric=train/loss", "objective.direction=minimize", f"hydra.sweep.dir={folder}",
        f"optimizer.lr={','.join(f'{number / 10000:g}' for number in range(1, JOBS + 1))}",
    ]  # fmt: skip
    begin = time.monotonic()
    early = last = None
    with commands.nobody_warm() as variables, (folder.parent / "output").open("wb") as output:
        process = psutil.Popen(
            command, cwd=commands.ROOT, env=commands.with_ours(variables), stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            ended = ended_jobs(folder)
            if ended >= EARLY and (early is None or ended >= (last or early).jobs + EARLY or ended == JOBS):
                found = held(process, ended, time.monotonic() - begin, folder)
                last = found or last
                early = early or found
                if found is not None:
                    report.progress(str(found))
            time.sleep(0.2 if ended < JOBS - EARLY else 0.05)
    if process.returncode or early is None or last is None:
        sys.exit((folder.parent / "output").read_text()[-2000:])
    return early, last


def ended_jobs(folder: Path) -> int:
    """Return how many jobs have left their summary."""
    return sum(1 for _ in folder.glob("*/summary.json"))


def held(process: psutil.Popen, jobs: int, at_s: float, folder: Path) -> Held | None:
    """Return what a sweep holds now; None if it is ending."""
    try:
        children = [child for child in process.children() if any(one.status == "LISTEN" for one in listening(child))]
        if not children:
            return None
        scheduler = children[0]
        times = process.cpu_times()
        return Held(
            jobs, at_s, process.memory_info().rss / 2**20, scheduler.memory_info().rss / 2**20, process.num_fds(),
            scheduler.num_fds(), times.user + times.system, disk_bytes(folder),
        )  # fmt: skip
    except psutil.NoSuchProcess:
        return None


def listening(process: psutil.Process) -> list[psutil._common.pconn]:
    """Return the connections of a process; [] if it has ended."""
    try:
        return process.net_connections("tcp")
    except psutil.Error:
        return []


def disk_bytes(folder: Path) -> int:
    """Return the space that the files of a folder take, each counted once."""
    blocks = {}
    for path in folder.rglob("*"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        blocks[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(blocks.values())


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=1)
