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
from ddp_hydra.storage.results_root import Store
from ddp_hydra.writers.progress_state import Pace

NAME = "status.json"
STOP = "stop"
"""An object by which somebody asks the run to end."""
SUMMARY = "summary.json"
ENDED = ("done", "failed", "interrupted")
LOST = "lost"
"""The driver has lost the scheduler, and has ended; another one goes on with the run."""
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
        state: starting, running, ending, and at last `LOST` or one of `ENDED`.
        said: what the driver has said at the end.
        files: names of what is in the store.
        attempts: those that have failed, as in summary.json.
    """

    def __init__(self, scheduler: str, project: str, lives: int = 0) -> None:
        self.state, self.said = "starting", ""
        self.files: list[str] = []
        self.attempts: list[dict[str, Any]] = []
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

    def note_attempts(self, attempts: list[dict[str, Any]]) -> None:
        """Take the attempts that have failed."""
        with self._lock:
            self.attempts = attempts

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
                "attempts": self.attempts,
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


def attempts_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the attempts that a lost driver's status tells of, the one that was lost with it last.

    Args:
        found: the status, as `read`.
    """
    start = found.get("start") or {}
    attempts = [attempt for attempt in found.get("attempts") or () if isinstance(attempt, dict)]
    step, number = found.get("step") or 0, found.get("attempt") or 0
    who = f"its driver, process {found.get('pid')} on {found.get('host')},"
    how = f"{who} was killed, or its host is gone" if found.get("state") != LOST else f"{who} lost the scheduler"
    failure = {"kind": "lost", "rank": None, "host": found.get("host"), "attempt": number, "step": step}
    return [
        *attempts,
        {
            "attempt": number,
            "world_size": start.get("data", {}).get("world_size"),
            "steps_done": step,
            "wall_s": max(0.0, (found.get("time") or 0.0) - (found.get("started") or 0.0)),
            "failure": {**failure, "message": how, "place": "", "traceback": ""},
        },
    ]


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
