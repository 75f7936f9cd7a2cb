"""Keeps status.json up to date, which shows other processes the progress of a running job."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from ddp_hydra import run_state
from ddp_hydra.errors import RecordError
from ddp_hydra.record import Metrics, Record, Start, Text
from ddp_hydra.results import finite
from ddp_hydra.run_state import AttemptEntry, Status
from ddp_hydra.storage.files import write_atomic
from ddp_hydra.writers.progress_state import ProgressState

NAME = "status.json"
INTERVAL_S = 0.5
STOPPED_EARLY = "stopped early"
"""The name of the text in which rank 0 says why the run is done before its last step."""


class JobStatus:
    """Collects the content of status.json from the records of rank 0.

    Args:
        clock: a monotonic clock, in seconds.

    Attributes:
        state: starting, then running; a remote job's driver sets further ones.
        start: the start record of the newest attempt; world_size: its number of ranks.
        stopped_early: why the run is done before its last step; "" if it is not.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = "starting"
        self.start: Record | None = None
        self.world_size = 0
        self.stopped_early = ""
        self._progress = ProgressState(clock)
        self._eta_s: float | None = None

    def update(self, record: Record) -> bool:
        """Take over a start or metrics record of rank 0, or why it stopped early; return whether it was one."""
        data = record.data
        if record.rank != 0:
            return False
        if isinstance(data, Text) and data.name == STOPPED_EARLY:
            self.stopped_early = data.text
            return True
        if isinstance(data, Start):
            self.start, self.world_size = record, data.world_size
            self._progress.start(record, data)
        elif isinstance(data, Metrics):
            self._progress.update(record, data)
        else:
            return False
        self.state = "running"
        self._eta_s = self._progress.eta_s()
        return True

    def content(self) -> Status:
        """Return all fields but the time."""
        progress, start = self._progress, self.start
        return Status(
            state=self.state,
            host=socket.gethostname(),
            pid=os.getpid(),
            attempt=start.attempt if start else 0,
            world_size=self.world_size,
            step=progress.step,
            total_steps=progress.total_steps,
            epoch=progress.epoch,
            epochs=progress.epochs,
            eta_s=self._eta_s,
            stopped_early=self.stopped_early,
            metrics=finite({**progress.metrics, **progress.epoch_means}),
        )


def encode(content: Status) -> bytes:
    """Return the bytes of status.json, with the present time."""
    return run_state.encode(replace(content, time=time.time()))


class StatusWriter:
    """Writes status.json into the run directory while the job runs, and removes it at the end.

    `summary.json` then says how the job ended. A write that fails is left out, because no job depends on it.

    Args:
        run_dir: the job's run directory.
        clock: a monotonic clock, in seconds.
        attempts: returns the attempts that have failed, as in summary.json.
    """

    def __init__(
        self,
        run_dir: Path,
        clock: Callable[[], float] = time.monotonic,
        attempts: Callable[[], list[AttemptEntry]] = list,
    ) -> None:
        self._path = run_dir / NAME
        self._attempts = attempts
        self._clock = clock
        self._status = JobStatus(clock)
        self._written = -INTERVAL_S

    def write(self, record: Record) -> None:
        """Take over a record; write at once if an attempt starts or stops early, else at most twice a second."""
        if not self._status.update(record):
            return
        if not isinstance(record.data, Metrics) or self._clock() - self._written >= INTERVAL_S:
            self._written = self._clock()
            self._save()

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        with contextlib.suppress(RecordError):
            content = replace(self._status.content(), attempts=self._attempts())
            write_atomic(self._path, encode(content), durable=False)
