"""Faults on purpose that strike the client: a writer that listens for its time, and then breaks something."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ddp_hydra.rank.fault_injection import ON_CLIENT, Fault
from ddp_hydra.results import Record
from ddp_hydra.storage.manifest import FOLDER


class FaultWriter:
    """Strikes once the metrics of a fault's step have come.

    Args:
        faults: of the job; those of ranks are left to them.
        run_dir: of the job.
        end_scheduler: ends the Dask scheduler.
    """

    def __init__(self, faults: Iterable[Fault], run_dir: Path, end_scheduler: Callable[[], None]) -> None:
        self.waiting = [fault for fault in faults if fault.kind in ON_CLIENT]
        self.run_dir, self.end_scheduler = run_dir, end_scheduler
        self.full_until = 0.0

    def write(self, record: Record) -> None:
        """Strike where it is time to.

        Raises:
            OSError: the disk is full, on purpose.
        """
        if record.kind == "metrics" and record.rank == 0:
            due = [f for f in self.waiting if f.attempt in (record.attempt, -1) and (record.step or 0) >= f.step]
            self.waiting = [fault for fault in self.waiting if fault not in due]
            for fault in due:
                print(f"fault on purpose: {fault}", flush=True)  # noqa: T201
                self.strike(fault)
        if time.monotonic() < self.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run_dir))

    def strike(self, fault: Fault) -> None:
        """Do it."""
        if fault.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif fault.kind == "client":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "scheduler":
            self.end_scheduler()
        elif fault.kind == "disk":
            self.full_until = time.monotonic() + fault.seconds
        elif fault.kind == "damage":
            damage(self.run_dir / FOLDER / "last.pt")

    def close(self) -> None:
        """Nothing is open."""


def damage(path: Path) -> None:
    """Change a byte in the middle of a file, and of all its other names."""
    if path.exists() and path.stat().st_size:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))


def end_scheduler(client: object) -> None:
    """Have the scheduler end without a word."""
    client.run_on_scheduler(os._exit, 1)  # type: ignore[attr-defined]
