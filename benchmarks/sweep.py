"""Compares sweeps of short jobs: our launcher, torchrun once per job, and Hydra's joblib launcher without DDP."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import commands, environments, report
from benchmarks.report import Figure, Goal

LRS = (0.1, 0.05, 0.02, 0.01)
BATCH_SIZES = (16, 32, 64)
"""Per rank."""
JOBS = len(LRS) * len(BATCH_SIZES)
RANKS = 2
AT_ONCE = 2
"""Jobs that our launcher and the joblib launcher run at the same time."""
STEPS = 100
SAMPLES = 16384
"""More than the steps take, so that no run comes to the end of an epoch."""
PEERS_EVERY = 3
"""Sweeps of ours for each one of the peers, which take long."""
JOBLIB = ("hydra-core==1.3.*", "hydra-joblib-launcher==1.2.*")


@dataclass(frozen=True)
class Job:
    """Holds the times of one job.

    Args:
        first_step: end of its first step, seconds since the epoch.
        train_s: all of its steps, the first and the checkpoint at the end included.
        wall_s: its process, from start to end; None where nobody says.
        end: when it had written all; None where nobody says.
    """

    first_step: float
    train_s: float
    wall_s: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Swept:
    """Holds the times of one sweep.

    Args:
        begin: when the command was given, seconds since the epoch.
        end: when the prompt came back.
        at_once: jobs at the same time.
        jobs: all of them.
    """

    begin: float
    end: float
    at_once: int
    jobs: tuple[Job, ...]

    @property
    def wall_s(self) -> float:
        """Return the time from the command to the prompt, in seconds."""
        return self.end - self.begin

    @property
    def start_up_s(self) -> float:
        """Return the time from the command to the first step of any job, in seconds."""
        return min(job.first_step for job in self.jobs) - self.begin

    @property
    def train_s(self) -> float:
        """Return the time of all steps of the median job, in seconds."""
        return statistics.median(job.train_s for job in self.jobs)

    @property
    def beyond_s(self) -> float:
        """Return the time that the median job's process takes beyond its steps, in seconds."""
        return statistics.median(job.wall_s - job.train_s for job in self.jobs if job.wall_s is not None)

    @property
    def closing_s(self) -> float:
        """Return the time from the end of the last job to the prompt, in seconds."""
        return self.end - max(job.end for job in self.jobs if job.end is not None)

    def overhead_s(self, without_start_up: bool = False) -> float:
        """Return the time of a job in its slot beyond the steps of the median job, in seconds.

        Args:
            without_start_up: leave out what comes before the very first step.
        """
        spent = self.wall_s - (self.start_up_s if without_start_up else 0.0)
        return spent * self.at_once / len(self.jobs) - self.train_s


def measure(repeats: int) -> Iterator[Figure]:
    """Sweep with each launcher in turn."""
    python = environments.python("joblib", *JOBLIB)
    ours: list[Swept] = []
    hand: list[Swept] = []
    joblib: list[Swept] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        by_hand(Path(folder) / "warm-up", [(LRS[0], BATCH_SIZES[0])])  # brings torch into the page cache
        for turn in range(repeats):
            place = Path(folder) / str(turn)
            if turn % PEERS_EVERY == 0:
                hand.append(shown("torchrun", by_hand(place / "hand", points())))
                joblib.append(shown("joblib launcher", by_joblib(place / "joblib", python)))
            ours.append(shown("ddp_hydra", by_us(place / "ours")))
    yield from figures(ours, hand, joblib)


def points() -> list[tuple[float, int]]:
    """Learning rate and batch size of each job."""
    return list(itertools.product(LRS, BATCH_SIZES))


def figures(ours: Sequence[Swept], hand: Sequence[Swept], joblib: Sequence[Swept]) -> Iterator[Figure]:
    """Return the figures."""

    def of(name: str, sweeps: Sequence[Swept], value: Callable[[Swept], float], goal: Goal | None = None) -> Figure:
        return report.times(name, [value(swept) for swept in sweeps], goal)

    n = len(ours[0].jobs)
    ours_took = of(f"{n} jobs, ddp_hydra, {ours[0].at_once} at once", ours, lambda swept: swept.wall_s)
    hand_took = of(f"{n} jobs, torchrun, one after the other", hand, lambda swept: swept.wall_s)
    joblib_took = of(f"{n} jobs without DDP, joblib, {joblib[0].at_once} at once", joblib, lambda swept: swept.wall_s)
    yield from (ours_took, hand_took, joblib_took)
    yield report.ratio("torchrun / ddp_hydra", hand_took, ours_took, Goal(8))
    yield report.ratio("joblib / ddp_hydra", joblib_took, ours_took)
    sides = (("ddp_hydra", ours), ("torchrun", hand), ("joblib", joblib))
    for name, sweeps in sides:
        yield of(f"start-up until the first step of all, {name}", sweeps, lambda swept: swept.start_up_s)
    yield of("closing after the end of the last job, ddp_hydra", ours, lambda swept: swept.closing_s)
    for name, sweeps in sides:
        yield of(f"steps of a job (train_s), {name}", sweeps, lambda swept: swept.train_s)
    yield of("process of a job without its steps, ddp_hydra", ours, lambda swept: swept.beyond_s)
    of_a_job: dict[str, Figure] = {}
    for name, sweeps in sides:
        slots = f"{sweeps[0].at_once} x wall / {n} - train_s"
        of_a_job[name] = of(f"overhead per job: {slots}, {name}", sweeps, Swept.overhead_s)
    yield from of_a_job.values()
    own = of(
        f"overhead per job, start-up apart: {ours[0].at_once} x (wall - start-up) / {n} - train_s, ddp_hydra",
        ours,
        lambda swept: swept.overhead_s(without_start_up=True),
    )
    yield own
    # Each job of torchrun has its own start-up.
    yield report.ratio(
        "overhead per job: torchrun / ddp_hydra without its start-up", of_a_job["torchrun"], own, Goal(10)
    )


def by_us(folder: Path) -> Swept:
    """Our launcher: one command, no server is warm."""
    command = [
        sys.executable, "-m", "ddp_hydra", "-m", commands.CONF,
        f"cluster.n_workers={RANKS * AT_ONCE}",
        f"dispatch.ranks={RANKS}",
        "data=bench",
        f"data.train.n_samples={SAMPLES}",
        "model=mlp",
        "optimizer=stamped_sgd",
        "optimizer.stamp=${hydra:runtime.output_dir}/first-step",
        "scheduler=none",
        f"trainer.max_steps={STEPS}",
        "trainer.threads=1",
        "objective.metric=train/loss",
        "objective.direction=minimize",
        f"optimizer.lr={listed(LRS)}",
        f"data.batch_size={listed(BATCH_SIZES)}",
        f"hydra.sweep.dir={folder}",
    ]  # fmt: skip
    with commands.nobody_warm() as variables:
        begin = commands.run(command, variables)
        end = time.time()
    return read(folder, begin, end, AT_ONCE)


def by_hand(folder: Path, jobs: Sequence[tuple[float, int]]) -> Swept:
    """Torchrun: a command for each job, one after the other."""
    begin = time.time()
    for number, (lr, batch_size) in enumerate(jobs):
        what = (f"--lr={lr}", f"--batch-size={batch_size}", f"--steps={STEPS}", f"--samples={SAMPLES}")
        commands.torchrun("sweep_ddp.py", *what, f"--folder={folder / str(number)}", ranks=RANKS)
    return read(folder, begin, time.time(), at_once=1)


def by_joblib(folder: Path, python: str) -> Swept:
    """Hydra's joblib launcher: one command, a process for each job, which takes the batches of all ranks."""
    command = [
        python, str(commands.ROOT / "benchmarks" / "peers" / "sweep_single.py"), "-m",
        f"hydra.launcher.n_jobs={AT_ONCE}",
        f"steps={STEPS}",
        f"samples={SAMPLES}",
        f"lr={listed(LRS)}",
        f"batch_size={listed([RANKS * batch_size for batch_size in BATCH_SIZES])}",
        f"hydra.sweep.dir={folder}",
    ]  # fmt: skip
    begin = commands.run(command, commands.ONE_THREAD | {"PYTHONPATH": ""})
    return read(folder, begin, time.time(), AT_ONCE)


def listed(values: Sequence[float]) -> str:
    """Return values in the syntax of a sweep."""
    return ",".join(map(str, values))


def read(folder: Path, begin: float, end: float, at_once: int) -> Swept:
    """Read the files of a sweep: summary.json and first-step of each job; our launcher's sweep.json.

    Args:
        folder: with a folder for each job.
        begin: when the command was given, seconds since the epoch.
        end: when the prompt came back.
        at_once: jobs at the same time.
    """
    overview = folder / "sweep.json"
    rows: list[dict[str, Any]] = json.loads(overview.read_text())["jobs"] if overview.is_file() else []
    walls = {row["folder"]: row["wall_s"] for row in rows}
    jobs = []
    for summary in sorted(folder.glob("*/summary.json")):
        said, place = json.loads(summary.read_text()), summary.parent
        first_step = float((place / "first-step").read_text())
        ended = said["started"] + said["wall_s"] if "started" in said else None
        jobs.append(Job(first_step, said["train_s"], walls.get(place.name), ended))
    return Swept(begin, end, at_once, tuple(jobs))


def shown(name: str, swept: Swept) -> Swept:
    """Print what was measured, after a check that all jobs are there."""
    if len(swept.jobs) != JOBS:
        sys.exit(f"{name}: {len(swept.jobs)} of {JOBS} jobs have ended well")
    report.progress(
        f"{name}: {swept.wall_s:.1f} s, first step after {swept.start_up_s:.1f} s, "
        f"{swept.train_s:.2f} s of steps per job"
    )
    return swept


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=3)
