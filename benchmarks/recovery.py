"""Recovery of a gang: from the SIGKILL of a rank to its first step in the next attempt, beside torchrun."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import commands, report
from benchmarks.commands import Running
from benchmarks.report import Figure, Goal

RANKS = (2, 4)
STEP_S = 0.01
"""Pause in each step; the tiny model adds some milliseconds."""
STEPS = 60_000
"""End of a job that nobody ends."""
EVERY = 10
"""Steps from one checkpoint to the next; it stands in the script by hand, too."""
PATIENCE_S = 60.0
"""How long to wait for a first step."""


@dataclass(frozen=True)
class Step:
    """A step of rank 0.

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
    """What one kill cost.

    Args:
        detect_s: until the launcher said that it knows.
        first_step_s: until the next attempt had done its first step.
        lost: steps that are done again.
    """

    detect_s: float
    first_step_s: float
    lost: int


class Victim:
    """A training whose processes are killed.

    Args:
        running: its command.
        folder: where its optimizer writes.
        ranks: how many.
        says: what the command says when it knows of a failure.
        workers: Dask workers that have to be there before a kill.
    """

    def __init__(self, running: Running, folder: Path, ranks: int, says: str, workers: int = 0) -> None:
        self.running, self.folder, self.ranks, self.says, self.workers = running, folder, ranks, says, workers
        self.random = random.Random(0)
        self.steps: list[Step] = []

    def kills(self, n: int, whom: str) -> Iterator[Kill]:
        """Kill n times.

        Args:
            n: how often.
            whom: "rank", or "worker" for the Dask worker of a rank.
        """
        self.wait(lambda: self.read(), "its first step")
        for _ in range(n):
            # Further than ever, so that no two attempts end alike; then at any point between two checkpoints.
            furthest = max(step.number for step in self.steps) + EVERY + self.random.uniform(0, EVERY)
            self.wait(lambda goal=furthest: self.read()[-1].number >= goal, "progress")
            self.wait(self.is_whole, "its workers")
            time.sleep(self.random.uniform(0, STEP_S))
            yield self.kill(whom)

    def kill(self, whom: str) -> Kill:
        """Kill one, and watch the others get over it."""
        attempt = self.steps[-1].pid
        pid = json.loads((self.folder / f"rank-{self.random.randrange(self.ranks)}").read_text())[whom]
        assert pid > 1
        begin = time.time()
        os.kill(pid, signal.SIGKILL)
        self.wait(lambda: self.read()[-1].pid != attempt, "its first step again")
        at = self.steps.index(next(step for step in self.steps if step.pid not in (attempt, 0) and step.time > begin))
        return Kill(0, 0, 0)

    def read(self) -> list[Step]:
        """All steps so far."""
        return self.steps
