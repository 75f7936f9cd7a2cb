"""Sends messages from a driver to the command that waits for it, as JSON in a topic of the scheduler."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ddp_hydra.record import Metrics, Record, Start

POLL_S = 0.5
GONE_S = 3.0
"""A client that is not connected to the scheduler for so long is gone."""
DELETE_DELAY_S = 2.0
"""How long a topic outlives its last message, so that the command can still read it."""

log = logging.getLogger(__name__)


def stop_topic(driver: str) -> str:
    """Return the topic in which a driver is asked to stop."""
    return f"{driver}-stop"


class EventChannel(logging.Handler):
    """Sends the driver's records and log lines to the command. It is a writer and a logging handler.

    Args:
        client: the driver's client.
        driver: the driver's name.
    """

    def __init__(self, client: Any, driver: str) -> None:
        super().__init__(logging.INFO)
        self._client, self._topic = client, driver

    def send(self, **message: Any) -> None:
        """Send JSON values, if the scheduler is connected."""
        if self._client.status == "running":
            self._client.log_event(self._topic, json.dumps(message).encode())

    def write(self, record: Record) -> None:
        """Send a start or metrics record of rank 0."""
        if record.rank == 0 and isinstance(record.data, Start | Metrics):
            self.send(record=record.encode().decode())

    def emit(self, record: logging.LogRecord) -> None:
        """Send a log line."""
        try:
            self.send(line=record.getMessage(), level=record.levelno)
        except Exception:
            self.handleError(record)  # as every handler does: a message that can't be made stops nobody

    def delete_topics(self) -> None:
        """Have the scheduler delete the driver's topics soon."""
        if self._client.status == "running":
            self._client.run_on_scheduler(delete_topics, [self._topic, stop_topic(self._topic)])


@contextmanager
def liveness_watched(client: Any, other: str, on_gone: Callable[[], None]) -> Iterator[None]:
    """Watch, inside the block, whether another client is still connected to the scheduler.

    Args:
        client: a client of this process.
        other: the id of the client to watch.
        on_gone: called once, in another thread, when the other client is gone.
    """
    end = threading.Event()

    def watch() -> None:
        seen = time.monotonic()
        while not end.wait(POLL_S):
            try:
                if client.run_on_scheduler(is_connected, other):
                    seen = time.monotonic()
            except Exception:  # the scheduler does not answer; the job itself notices its loss
                seen = time.monotonic()
            if time.monotonic() - seen > GONE_S:
                on_gone()
                return

    thread = threading.Thread(target=watch, name="liveness watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def is_connected(client: str, dask_scheduler: Any = None) -> bool:
    """Return whether a client is connected. Runs on the scheduler."""
    return client in dask_scheduler.clients


def delete_topics(topics: list[str], dask_scheduler: Any = None) -> None:
    """Delete the messages of topics after a delay. Runs on the scheduler."""
    for topic in topics:
        dask_scheduler.loop.call_later(DELETE_DELAY_S, dask_scheduler._broker._topics.pop, topic, None)
