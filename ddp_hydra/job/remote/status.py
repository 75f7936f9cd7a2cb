"""Tells commands where a remote run is, by status.json in the store."""

from __future__ import annotations

import threading
import time
from typing import Any

from msgspec.structs import replace

import ddp_hydra
from ddp_hydra.errors import Interrupted, RunFailed
from ddp_hydra.record import Record
from ddp_hydra.run_state import AttemptEntry, FailureEntry, Status, decode
from ddp_hydra.storage.base import Store
from ddp_hydra.writers.status import NAME, JobStatus, encode

STOP = "stop"
"""The object that asks a run to end."""
SUCCEEDED = ("done", "paused")
"""States of a run that went as it was asked to."""
ENDED = (*SUCCEEDED, "stopped", "failed", "interrupted")
LOST = "lost"
"""The state of a run whose driver has ended because it lost the scheduler; another driver resumes the run."""
HEARTBEAT_S = 2.0
"""The status is written at least this often while the driver is alive."""
LOST_S = 20.0
"""A driver that has not updated its status for so long is considered lost."""


class DriverStatus(JobStatus):
    """Collects the status of a remote run. It is also a writer: it takes the records of the job.

    Args:
        scheduler: address of the scheduler.
        project: sha256 of the project space.
        max_restarts: how many drivers may follow this one.
        more: further fields of `Status`.

    Attributes:
        now: its state is starting, running, ending, and at last `LOST` or one of `ENDED`.
        files: names of the uploaded files.
    """

    def __init__(self, scheduler: str, project: str, max_restarts: int = 0, **more: Any) -> None:
        version, now = ddp_hydra.__version__, time.time()
        fixed = {"ddp_hydra": version, "scheduler": scheduler, "project": project, "started": now, **more}
        super().__init__(base=Status(**fixed, max_restarts=max_restarts))
        self.files: list[str] = []
        self._lock = threading.Lock()
        self._written: Status | None = None
        self._written_at = 0.0

    def write(self, record: Record) -> None:
        with self._lock:
            self.update(record)

    def close(self) -> None:
        """Note that the job writes no more; the uploader still uploads what is there."""
        self.now.state = "ending"

    def content(self) -> Status:
        with self._lock:
            return replace(super().content(), files=self.files, start=self.start)

    def next_update(self) -> bytes | None:
        """Return the status to write now; None if it has not changed and no heartbeat is due."""
        content, now = self.content(), time.monotonic()
        if content == self._written and now - self._written_at < HEARTBEAT_S:
            return None
        self._written, self._written_at = content, now
        return encode(content)


def failed_attempts(status: Status) -> list[AttemptEntry]:
    driver = f"its driver, process {status.pid} on {status.host},"
    is_cut = status.state == LOST
    message = f"{driver} lost the scheduler" if is_cut else f"{driver} was killed, or its host is gone"
    started, step = status.started or 0.0, status.step or 0
    lost = AttemptEntry(
        attempt=status.attempt,
        world_size=status.world_size or None,
        steps_done=step,
        started=started,
        wall_s=max(0.0, (status.time or 0.0) - started),
        failure=FailureEntry(kind="lost", host=status.host, attempt=status.attempt, step=step, message=message),
    )
    return [*status.attempts, lost]


def read(store: Store) -> Status | None:
    try:
        return decode(store.get(NAME), Status, f"{NAME} in {getattr(store, 'url', 'the store')}")
    except FileNotFoundError:
        return None


def conclude(state: str, message: str) -> None:
    if state == "interrupted":
        raise Interrupted(message)
    if state not in SUCCEEDED:
        raise RunFailed(message)
    print(message)  # noqa: T201
