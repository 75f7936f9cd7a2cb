"""status.json in the store: where a run is, for those who have nothing but the store."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import Any

import ddp_hydra
from ddp_hydra.results import Record, finite
from ddp_hydra.store import Store
from ddp_hydra.writers.pace import Pace

NAME = "status.json"
STOP = "stop"
"""An object by which somebody asks the run to end."""
SUMMARY = "summary.json"
ENDED = ("done", "failed", "interrupted")
BEAT_S = 2.0
"""How often it says that the driver is there, at least."""
LOST_S = 20.0
"""A driver that has said nothing for so long is gone."""


class Status:
    """Where a run is. It is also a writer: it takes the records of the job.

    Args:
        scheduler: address of the scheduler.
        project: sha256 of the project space.
        lives: how many drivers may follow this one.

    Attributes:
        state: starting, running, ending, and at last one of `ENDED`.
        said: what the driver has said at the end.
        files: names of what is in the store.
    """

    def __init__(self, scheduler: str, project: str, lives: int = 0) -> None:
        self.state, self.said = "starting", ""
        self.files: list[str] = []
        self._fixed = {
            "ddp_hydra": ddp_hydra.__version__,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "scheduler": scheduler,
            "project": project,
            "started": time.time(),
            "lives": lives,
        }
        self._lock = threading.Lock()
        self._pace = Pace(time.monotonic)
        self._start: Record | None = None
        self._shown: dict[str, Any] = {}
        self._shown_at = 0.0

    def write(self, record: Record) -> None:
        """Take a start or metrics record of rank 0."""
        if record.rank != 0 or record.kind not in ("start", "metrics"):
            return
        with self._lock:
            self.state = "running"
            if record.kind == "start":
                self._start = record
                self._pace.start(record)
            else:
                self._pace.update(record)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The job writes no more; what is still on its way is the uploader's."""
        self.state = "ending"

    def content(self) -> dict[str, Any]:
        """All that it says, but the time."""
        with self._lock:
            pace, start = self._pace, self._start
            return {
                "state": self.state,
                "said": self.said,
                "files": self.files,
                **self._fixed,
                "attempt": start.attempt if start else 0,
                "step": pace.step,
                "total_steps": pace.total_steps,
                "epoch": pace.epoch,
                "metrics": finite(pace.metrics),
                "start": json.loads(start.encode()) if start else None,
            }

    def due(self) -> bytes | None:
        """Return what is to be shown now, if it is news, or if a sign of life is due."""
        content, now = self.content(), time.monotonic()
        if content == self._shown and now - self._shown_at < BEAT_S:
            return None
        self._shown, self._shown_at = content, now
        return encoded(content)


def encoded(content: dict[str, Any]) -> bytes:
    """Return the object's content, as of now."""
    return (json.dumps({**content, "time": time.time()}, allow_nan=False) + "\n").encode()


def read(store: Store) -> dict[str, Any]:
    """What a store says of the run in it; {} for nothing that makes sense."""
    return read_object(store, NAME)


def read_object(store: Store, name: str) -> dict[str, Any]:
    """A JSON object of a store; {} where there is none."""
    try:
        found = json.loads(store.get(name))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
