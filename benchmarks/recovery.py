"""Recovery of a gang: from the SIGKILL of a rank to its first step in the next attempt, compared with torchrun."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import commands, report
from benchmarks.commands import Running
from benchmarks.report import Figure, Goal

RANKS = (2, 4)
STEP_S = 0.01
"""Pause in each step; the tiny model adds some milliseconds."""
STEPS = 60_000
"""End of a job that nobody ends."""
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Gives each attempt of torchrun a new store. In the one it shares otherwise, ranks find addresses of the attempt
before, connect to nobody, and fail again and again (torch 2.15, issue 135712)."""
EVERY = 10
"""Steps from one checkpoint to the next; it stands in the script by hand, too."""
PATIENCE_S = 60.0
"""How long to wait for a first step."""


@dataclass(frozen=True)
class Step:
    """Holds one step of rank 0.

    Args:
        time: when it was done, seconds since the epoch.
        pid: of the process, which is another one in each attempt.
        number: counted from 1.
    """

    time: float
    pid: int
    number: int


@dataclass(frozen=True)
class Kill:
    """Holds the cost of one kill.

    Args:
        detect_s: until the launcher said that it knows.
        first_step_s: until the next attempt had done its first step.
        lost: steps that are done again.
    """

    detect_s: float
    first_step_s: float
    lost: int


class Training:
    """Runs a training that is killed again and again.

    Args:
        running: its command.
        folder: where its optimizer writes.
        ranks: how many.
        says: what its command says when it knows of a failure.
        workers: Dask workers that have to be there before a kill.
    """

    def __init__(self, running: Running, folder: Path, ranks: int, says: str, workers: int = 0) -> None:
        self.running, self.folder, self.ranks, self.says, self.workers = running, folder, ranks, says, workers
        self.random = random.Random(0)
        self.steps: list[Step] = []
        self.read_bytes = 0

    def kills(self, n: int, whom: str) -> Iterator[Kill]:
        """Kill again and again.

        Args:
            n: how often.
            whom: "rank", or "worker" for the Dask worker of a rank.
        """
        self.wait_for(lambda: bool(self.read()), "step")
        for _ in range(n):
            # Further than ever, so that no two attempts end alike; then at any moment between two checkpoints.
            enough = max(step.number for step in self.steps) + EVERY + self.random.randrange(EVERY)
            self.wait_for(lambda enough=enough: self.read()[-1].number >= enough, "progress")
            self.wait_for(self.is_whole, "replacement of its worker")
            time.sleep(self.random.uniform(0, STEP_S))
            yield self.kill(whom)

    def kill(self, whom: str) -> Kill:
        """Kill a rank or its worker, and see the gang get over it."""
        process = json.loads((self.folder / f"rank-{self.random.randrange(self.ranks)}").read_text())[whom]
        attempt, begin = self.read()[-1].pid, time.time()
        os.kill(process, signal.SIGKILL)
        self.wait_for(lambda: self.read()[-1].pid != attempt, "first step of its next attempt")
        index = next(index for index, step in enumerate(self.steps) if step.time > begin and step.pid != attempt)
        self.wait_for(lambda: self.running.said(self.says, begin) is not None, "word of the failure")
        first, detected = self.steps[index], self.running.said(self.says, begin)
        assert detected is not None
        return Kill(detected - begin, first.time - begin, self.steps[index - 1].number - first.number + 1)

    def read(self) -> list[Step]:
        """Return all steps so far."""
        path = self.folder / "steps"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self.read_bytes)
                lines = file.read().rpartition(b"\n")[0]
            if lines:
                self.read_bytes += len(lines) + 1
                fields = (line.split() for line in lines.splitlines())
                self.steps += [Step(float(at), int(pid), int(number)) for at, pid, number in fields]
        return self.steps

    def is_whole(self) -> bool:
        """Return whether all Dask workers are there."""
        pids = (int(path.name.partition("-")[2]) for path in self.folder.glob("worker-*"))
        return sum(map(psutil.pid_exists, pids)) >= self.workers

    def wait_for(self, come: Callable[[], bool], what: str) -> None:
        """Wait until something has come."""
        deadline = time.monotonic() + PATIENCE_S
        while not come():
            if self.running.process.poll() is not None:
                self.running.fail("it has ended")
            if time.monotonic() > deadline:
                self.running.fail(f"no {what} in {PATIENCE_S:g} s")
            time.sleep(0.005)


def measure(repeats: int) -> Iterator[Figure]:
    """Kill ranks of torchrun and of ddp_hydra, then Dask workers. Many ranks of torchrun take long: half as often."""
    for ranks in RANKS:
        name = f"{ranks} ranks"
        turns = repeats if ranks == RANKS[0] else max(1, repeats // 2)
        theirs = struck(f"{name}, torchrun", torchrun(ranks), turns)
        ours = struck(f"{name}, ddp_hydra", ddp_hydra(ranks), repeats)
        yield from figures(f"{name}, torchrun", theirs)
        yield from figures(f"{name}, ddp_hydra", ours, detect=Goal(0.5, at_most=True), again=Goal(3, at_most=True))
        over, under = (report.times(name, [kill.first_step_s for kill in kills]) for kills in (theirs, ours))
        yield report.ratio(f"{name}, first step again: torchrun / ddp_hydra", over, under, Goal(10))
    for spare, what in ((0, "worker killed"), (1, "worker killed, one to spare")):
        name = f"{RANKS[0]} ranks, {what}"
        yield from figures(name, struck(name, ddp_hydra(RANKS[0], spare), repeats, "worker"))


def struck(name: str, training: AbstractContextManager[Training], n: int, whom: str = "rank") -> list[Kill]:
    """Kill n times."""
    kills = []
    with training as victim:
        for kill in victim.kills(n, whom):
            kills.append(kill)
            report.progress(f"{name}: noticed after {kill.detect_s:.2f} s, first step after {kill.first_step_s:.2f} s")
    return kills


def figures(name: str, kills: list[Kill], detect: Goal | None = None, again: Goal | None = None) -> Iterator[Figure]:
    """Return the figures of one training."""
    yield report.times(f"{name}: detect", [kill.detect_s for kill in kills], detect)
    yield report.times(f"{name}: first step again", [kill.first_step_s for kill in kills], again)
    yield report.times(f"{name}: steps lost", [kill.lost for kill in kills], unit="steps")


@contextmanager
def ddp_hydra(ranks: int, spare: int = 0) -> Iterator[Training]:
    """Run a job that restarts as often as it is killed."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, commands.nobody_warm() as variables:
        overrides = [
            f"cluster.n_workers={ranks + spare}",
            "cluster.processes=true",  # some are killed
            "cluster.preload=[ddp_hydra.rank.dask_preload,benchmarks.worker_pid]",
            f"dispatch.ranks={ranks}",
            "dispatch.max_restarts=1000",
            "data=bench",
            "data.train.n_samples=16384",
            "model=mlp",
            "optimizer=traced_sgd",
            f"optimizer.step_s={STEP_S}",
            f"optimizer.folder={folder}",
            "scheduler=none",
            "trainer.epochs=null",
            f"trainer.max_steps={STEPS}",
            "trainer.threads=1",
            f"trainer.checkpoint_every_steps={EVERY}",
            "objective.metric=train/loss",
            "objective.direction=minimize",
        ]
        command = commands.job(*overrides, run_dir=Path(folder) / "run")
        with Running(command, {**variables, "BENCH_FOLDER": folder}) as running:
            yield Training(running, Path(folder), ranks, r"restart \d+ of ", ranks + spare)


@contextmanager
def torchrun(ranks: int) -> Iterator[Training]:
    """Run the hand-written script under a torchrun that restarts it."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        options = ("--max-restarts=1000", "--monitor-interval=0.1")
        arguments = (folder, str(STEP_S), str(STEPS))
        command = commands.by_hand("torchrun_recovery.py", *arguments, ranks=ranks, options=options)
        with Running(command, commands.ONE_THREAD | OWN_STORE) as running:
            yield Training(running, Path(folder), ranks, r"closing signal|failed \(exitcode")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves nothing behind, like Ctrl-C
    report.main(__doc__, measure, repeats=20)
