"""Queues the records of a gang, has them read on a thread of its own, and counts those that nobody reads.

Fetching a checkpoint, or waiting for room on a full disk, may take a minute. Meanwhile the client must still notice
that a rank dies.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

from ddp_hydra.console.text import counted
from ddp_hydra.record import File, Record

log = logging.getLogger(__name__)
CLOSE_S = 5.0
"""Seconds that the end waits for the record that is being read."""
FOR_READERS = {"metrics": "metrics record", "text": "text", "image": "image", "histogram": "histogram", "file": "file"}
"""Kinds of records that `results.log`, `text`, `image`, `histogram` and `submit` send; a name for one record."""


class RecordQueue:
    """Has records read in order, once it is started; stops at the first that cannot be read.

    Args:
        on_record: reads one record.
        acknowledge: called with rank and number of bytes after each record.
        on_error: called when `on_record` has raised.

    Attributes:
        error: that `on_record` raised.
        failed: the record for which it did.
        busy: the record that is being read, and since when.
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
        self.resume = threading.Event()
        self.closed = False
        self.thread = threading.Thread(target=self._read, name="ddp_hydra-record-queue", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def put(self, record: Record, size: int) -> None:
        self.put_count += 1
        self.waiting.put((record, size))

    def catch_up(self, until: float = math.inf) -> bool:
        """Wait until all queued records are read.

        Returns:
            Whether all are read; False also if a record could not be read.
        """
        while self.read_count < self.put_count and self.error is None and time.monotonic() < until:
            time.sleep(0.002)
        return self.read_count == self.put_count

    def skip_failed(self) -> None:
        log.warning("lost with its host: %s", self.error)
        self.error = self.failed = None
        self.resume.set()

    def close(self) -> None:
        """Read no more records; the one that is being read may still go on."""
        self.closed = True
        self.waiting.put(None)
        self.resume.set()
        self.thread.join(CLOSE_S)

    def _read(self) -> None:
        while (item := self.waiting.get()) is not None and not self.closed:
            record, size = item
            self.busy = record, time.monotonic()
            try:
                self.on_record(record)
                self.acknowledge(record.rank, size)
            except BaseException as error:
                self.resume.clear()
                self.error, self.failed = error, record
                self.on_error()
                if not self.closed:
                    self.resume.wait()
            self.busy = None
            self.read_count += 1


class UnreadRecords:
    """Counts dropped records by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def note(self, record: Record) -> None:
        if record.kind in FOR_READERS:
            self.counts[record.kind] += 1
            self.bytes += record.data.size if isinstance(record.data, File) else 0

    def sentence(self) -> str:
        """Say what was dropped and how to receive it; "" if nothing was."""
        if not self.counts:
            return ""
        named = [counted(self.counts[kind], name) for kind, name in FOR_READERS.items() if self.counts[kind]]
        size = f" ({self.bytes / 2**20:,.1f} MiB)" if self.counts["file"] else ""
        return (
            f"dropped, because nothing reads what the ranks sent with results.*: {', '.join(named)}{size}; have it "
            "written with run_dir=<folder>, or receive it with dispatch.Gang(client, on_record=<function of a record>) "
            "and files in there with the gang's fetch(record, path)"
        )
