"""What a driver says to the command that waits for it, through the scheduler: JSON, in a topic of its own."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ddp_hydra.results import Record

LOOK_S = 0.5
LEFT_S = 3.0
"""Who is not connected to the scheduler for so long has left."""
LATE_S = 2.0

log = logging.getLogger(__name__)


def stops(name: str) -> str:
    """The topic in which a driver is asked to end."""
    return f"{name}-stop"


class EventChannel(logging.Handler):
    """Says to the command what the driver does. It is a writer of records and a handler of log lines.

    Args:
        client: of the driver.
        name: of the driver.
    """

    def __init__(self, client: Any, name: str) -> None:
        super().__init__(logging.INFO)
        self._client, self._topic = client, name

    def say(self, **message: Any) -> None:
        """Say something; JSON values."""
        if self._client.status == "running":
            self._client.log_event(self._topic, json.dumps(message).encode())

    def write(self, record: Record) -> None:
        """Pass on a start or metrics record of rank 0."""
        if record.rank == 0 and record.kind in ("start", "metrics"):
            self.say(record=record.encode().decode())

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a line of the log."""
        self.say(line=record.getMessage(), level=record.levelno)

    def forget(self) -> None:
        """Have the scheduler forget what was said, soon."""
        if self._client.status == "running":
            self._client.run_on_scheduler(forget, [self._topic, stops(self._topic)])


class Watch:
    """Notices that somebody has left the scheduler.

    Args:
        client: by which to ask.
        other: the client id of that somebody.
        on_left: called once.
    """

    def __init__(self, client: Any, other: str, on_left: Callable[[], None]) -> None:
        self._client, self._other, self._on_left = client, other, on_left
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._end.set()
        self._thread.join()

    def _work(self) -> None:
        seen = time.monotonic()
        while not self._end.wait(LOOK_S):
            try:
                if self._client.run_on_scheduler(is_there, self._other):
                    seen = time.monotonic()
            except Exception:  # of a scheduler that is gone, whose loss the job itself will notice
                seen = time.monotonic()
            if time.monotonic() - seen > LEFT_S:
                self._on_left()
                return


def is_there(client: str, dask_scheduler: Any = None) -> bool:
    """Whether a client is connected. Runs on the scheduler."""
    return client in dask_scheduler.clients


def forget(topics: list[str], dask_scheduler: Any = None) -> None:
    """Drop what the scheduler keeps of topics. Runs on the scheduler."""
    for topic in topics:
        dask_scheduler.loop.call_later(LATE_S, dask_scheduler._broker._topics.pop, topic, None)
