"""A writer that injects faults into the client process, where results are written."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ddp_hydra.rank.fault_injection import ON_CLIENT, Fault
from ddp_hydra.record import Metrics, Record
from ddp_hydra.storage.manifest import FOLDER


class FaultWriter:
    """Triggers each fault when the metrics of its step arrive.

    Args:
        faults: all faults of the job; those of ranks are ignored here.
        run_dir: the job's run directory.
        end_scheduler: ends the Dask scheduler.
    """

    def __init__(self, faults: Iterable[Fault], run_dir: Path, end_scheduler: Callable[[], None]) -> None:
        self.pending = [fault for fault in faults if fault.kind in ON_CLIENT]
        self.run_dir, self.end_scheduler = run_dir, end_scheduler
        self.full_until = 0.0

    def write(self, record: Record) -> None:
        """Trigger the faults that are due.

        Raises:
            OSError: a "disk" fault is active.
        """
        if isinstance(record.data, Metrics) and record.rank == 0:
            due = [f for f in self.pending if f.attempt in (record.attempt, -1) and (record.step or 0) >= f.step]
            self.pending = [fault for fault in self.pending if fault not in due]
            for fault in due:
                print(f"fault on purpose: {fault}", flush=True)  # noqa: T201
                self.trigger(fault)
        if time.monotonic() < self.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run_dir))

    def trigger(self, fault: Fault) -> None:
        """Cause one fault."""
        if fault.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif fault.kind == "client":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "scheduler":
            self.end_scheduler()
        elif fault.kind == "disk":
            self.full_until = time.monotonic() + fault.seconds
        elif fault.kind == "damage":
            corrupt(self.run_dir / FOLDER / "last.pt")

    def close(self) -> None:
        """Do nothing: nothing is open."""


def corrupt(path: Path) -> None:
    """Invert the middle byte of a file; hard links to it change, too."""
    if path.exists() and path.stat().st_size:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))


def end_scheduler(client: object) -> None:
    """End the scheduler's process without a goodbye to its clients."""
    client.run_on_scheduler(os._exit, 1)  # type: ignore[attr-defined]
