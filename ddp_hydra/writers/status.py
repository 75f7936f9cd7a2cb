"""status.json: where a job is while it runs, for others to look at."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from ddp_hydra.results import Record, finite
from ddp_hydra.storage.files import part_of
from ddp_hydra.writers.progress_state import Pace

INTERVAL_S = 0.5


class StatusWriter:
    """Keep `status.json` up to date: time, pid, attempt, world_size, step, epoch and metrics of rank 0.

    It is gone when the job has ended; `summary.json` says how. What cannot be written is left out: nothing depends
    on it.

    Args:
        run_dir: the job's run directory.
        clock: seconds, growing.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = run_dir / "status.json"
        self._clock = clock
        self._pace = Pace(clock)
        self._written = -INTERVAL_S
        self._attempt = self._world_size = 0

    def write(self, record: Record) -> None:
        """Take a start or metrics record of rank 0; writes at most twice a second."""
        if record.rank != 0 or record.kind not in ("start", "metrics"):
            return
        if record.kind == "start":
            self._attempt, self._world_size = record.attempt, record.data.get("world_size") or 0
            self._pace.start(record)
            self._written = -INTERVAL_S
        else:
            self._pace.update(record)
        if self._clock() - self._written >= INTERVAL_S:
            self._written = self._clock()
            self._save()

    def close(self) -> None:
        """Take the file away: the job has ended."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        pace = self._pace
        status = {
            "time": time.time(),
            "pid": os.getpid(),
            "attempt": self._attempt,
            "world_size": self._world_size,
            "step": pace.step,
            "total_steps": pace.total_steps,
            "epoch": pace.epoch,
            "epochs": pace.epochs,
            "eta_s": pace.eta_s(),
            "metrics": finite(pace.metrics),
        }
        part = part_of(self._path)
        with contextlib.suppress(OSError):
            try:
                part.write_text(json.dumps(status, allow_nan=False) + "\n")
                part.replace(self._path)
            finally:
                part.unlink(missing_ok=True)
