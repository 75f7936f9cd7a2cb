"""Disturbs ranks that save: they are killed at each call in turn or at any moment, have a full disk, or load it."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ddp_hydra import results
from ddp_hydra.storage.manifest import read_manifest
from ddp_hydra.training import load_run
from ddp_hydra.training.callbacks import Callback, RunView
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.sharded_checkpoint import ReportingFile

CALLS = (
    *((os, name) for name in ("replace", "rename", "link", "unlink", "mkdir", "rmdir", "fsync")),
    (ReportingFile, "_write"),
    (results, "emit"),
)
"""What a save does to the disk and to the client."""


def die() -> None:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class KillAtCall(Callback):
    """In attempt k, the call number k + 1 of a save is the last thing that a rank begins.

    It is the first save of an attempt, but there is a whole checkpoint before. Of the writes into a file, number 1, 2,
    4, 8 … count.

    Args:
        rank: the rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.left = rank, results._process.attempt + 1

    def on_start(self, run: RunView) -> None:
        """Count calls."""
        if run.rank == self.rank:
            self.saver, self.number = run._run.checkpoints, 3 if run.step == 0 else 1
            for owner, name in CALLS:
                setattr(owner, name, self.counted(name, getattr(owner, name)))

    def counted(self, name: str, call: Any) -> Any:
        """Return a call that may be the last one; a write is cut in half then."""

        def counting(*args: Any, **options: Any) -> Any:
            is_in_save = threading.current_thread().name.startswith("checkpoint")
            if is_in_save and self.saver.number == self.number and is_counted(name, *args):
                self.left -= 1
                if self.left == 0:
                    if name == "_write":
                        args[0].file.write(bytes(args[1])[: len(args[1]) // 2])
                        args[0].file.flush()
                    die()
            return call(*args, **options)

        return counting


def is_counted(name: str, *args: Any) -> bool:
    """Return whether a call counts."""
    if name != "_write":
        return True
    args[0].n_writes = n = vars(args[0]).get("n_writes", 0) + 1
    return n & (n - 1) == 0


class KillAtRandom(Callback):
    """Kills any rank at any moment from the second save on, in each of the first attempts.

    Args:
        attempts: how many.
        within_s: of the second save's begin.
        ranks: number of ranks.
    """

    def __init__(self, attempts: int, within_s: float, ranks: int) -> None:
        self.attempts, self.within_s, self.n_saves = attempts, within_s, 0
        drawn = random.Random(attempt := results._process.attempt)
        self.rank, self.pause_s = drawn.randrange(ranks), drawn.uniform(0, within_s)
        self.is_due = attempt < attempts

    def on_checkpoint(self, run: RunView) -> None:
        """Start the clock."""
        self.n_saves += 1
        if self.is_due and self.n_saves == 2 and run.rank == self.rank:
            threading.Thread(target=self.wait, daemon=True).start()

    def wait(self) -> None:
        """Die in a while."""
        time.sleep(self.pause_s)
        die()


class FullDisk(Callback):
    """A rank's disk is full for the first writes of a save in the background.

    Args:
        rank: the rank.
        tries: how many writes fail.
    """

    def __init__(self, rank: int, tries: int) -> None:
        self.rank, self.tries = rank, tries

    def on_start(self, run: RunView) -> None:
        """Fill it."""
        if run.rank == self.rank:
            write = ReportingFile._write
            ReportingFile._write = lambda file, data: self.fail() or write(file, data)

    def fail(self) -> None:
        """Fail as a file system does, a few times."""
        self.tries -= 1
        if self.tries >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Reload(Callback):
    """At the end, the process loads a checkpoint that it has written itself, and finds what it was.

    Args:
        step: of the checkpoint.
        folder: of the run's checkpoints, on this host.
    """

    changes_training = True

    def __init__(self, step: int, folder: str) -> None:
        self.step, self.folder = step, Path(folder)

    def on_checkpoint(self, run: RunView) -> None:
        """Keep a copy."""
        if run.step == self.step:
            self.kept = run._run.state.begin_capture()()

    def on_end(self, run: RunView) -> None:
        """Load it."""
        state, name = run._run.state, f"step-{self.step:06d}"
        run._run.checkpoints.wait()
        until = time.monotonic() + 60
        while not (found := [one for one in read_manifest(self.folder) if one.startswith(name)]):
            assert time.monotonic() < until
            time.sleep(0.05)
        now = state.begin_capture()()
        load_run.restore(state, read(self.folder / found[0], whole=False))
        again = state.begin_capture()()
        for part in ("model", "ema", "optimizer"):
            assert same(again[part], self.kept[part]), part
            assert not same(again[part], now[part]), part


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other
