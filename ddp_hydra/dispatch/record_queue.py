"""The records of a gang, handed to their reader on a thread of its own.

A checkpoint that takes a minute to fetch, or a full disk that is waited for, must not keep the client from noticing
that a rank has died.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from ddp_hydra.results import Record

log = logging.getLogger(__name__)
CLOSE_S = 5.0
"""How long a record that is being read may hold up the end."""


class Reader:
    """Reads records in order; stops at the first that cannot be read.

    Args:
        on_record: takes one record.
        acknowledge: called with rank and bytes when a record was read.
        on_error: called when `on_record` has raised.

    Attributes:
        error: what it raised.
        failed: the record that it was about.
        busy: the record that it takes just now, and since when.
    """

    def __init__(
        self,
        on_record: Callable[[Record], None],
        acknowledge: Callable[[int, int], None],
        on_error: Callable[[], None],
    ) -> None:
        self.on_record, self.acknowledge, self.on_error = on_record, acknowledge, on_error
        self.error: BaseException | None = None
        self.failed: Record | None = None
        self.busy: tuple[Record, float] | None = None
        self.waiting: queue.SimpleQueue[tuple[Record, int] | None] = queue.SimpleQueue()
        self.put_count = self.read_count = 0
        self.go_on = threading.Event()
        self.closed = False
        self.thread = threading.Thread(target=self._read, name="ddp_hydra-reader", daemon=True)
        self.thread.start()

    def put(self, record: Record, size: int) -> None:
        """Queue a record of so many bytes."""
        self.put_count += 1
        self.waiting.put((record, size))

    def catch_up(self, until: float = math.inf) -> bool:
        """Wait until all that was put is read.

        Args:
            until: give up at this time of the monotonic clock.

        Returns:
            Whether it is; not where a record could not be read.
        """
        while self.read_count < self.put_count and self.error is None and time.monotonic() < until:
            time.sleep(0.002)
        return self.read_count == self.put_count

    @property
    def busy_s(self) -> float:
        """How long it has been taking the same record."""
        busy = self.busy
        return time.monotonic() - busy[1] if busy else 0.0

    def forgive(self) -> None:
        """Go on after the record that could not be read."""
        log.warning("lost with its host: %s", self.error)
        self.error = self.failed = None
        self.go_on.set()

    def close(self) -> None:
        """Read no more. What is being read just now may take its time beyond that."""
        self.closed = True
        self.waiting.put(None)
        self.go_on.set()
        self.thread.join(CLOSE_S)

    def _read(self) -> None:
        while (item := self.waiting.get()) is not None and not self.closed:
            record, size = item
            self.busy = record, time.monotonic()
            try:
                self.on_record(record)
                self.acknowledge(record.rank, size)
            except BaseException as error:
                self.go_on.clear()
                self.error, self.failed = error, record
                self.on_error()
                if not self.closed:
                    self.go_on.wait()
            self.busy = None
            self.read_count += 1
