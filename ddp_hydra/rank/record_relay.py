"""Passes the records and the output of a worker's ranks on to the client.

The records of all ranks of a worker are sent together, in batches. While the client is behind with the records of a
rank, that rank is not read, so that it blocks instead of filling the worker's memory; its neighbours go on.
"""

from __future__ import annotations

import codecs
import os
import selectors
import socket
import time
from collections.abc import Callable

from distributed import Worker

from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.record import AnyData, End, Log, Notice, Record, begins

FLUSH_S = 0.05
"""Seconds that a record may wait for others, to be sent with them."""
WINDOW_BYTES = 4 * 2**20
"""Number of unacknowledged bytes at which the rank is no longer read."""
TAIL_BYTES = 8192
"""How much of the rank's last output is kept, to explain its end."""


class RecordSender:
    """Sends the records of a worker's ranks to the client, several as one event of a topic.

    Attributes:
        ended: rank -> how it has ended.
    """

    def __init__(self, worker: Worker, topic: str, attempt: int) -> None:
        self.worker, self.topic, self.attempt = worker, topic, attempt
        self.buffer: list[bytes] = []
        self.flushed_at = 0.0
        self.ended: dict[int, End] = {}

    def say(self, rank: int, data: AnyData) -> None:
        self.buffer.append(Record(data, rank, None, time.time(), self.attempt).encode())

    def warn(self, rank: int, sentence: str) -> None:
        self.say(rank, Notice(sentence))

    def say_end(self, rank: int, end: End) -> None:
        """Add how a rank has ended to those that wait, unless that was said before."""
        if rank not in self.ended:
            self.ended[rank] = end
            self.say(rank, end)

    def flush(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if self.buffer and (at_once or now - self.flushed_at >= FLUSH_S):
            self.worker.log_event(self.topic, b"\n".join(self.buffer))
            self.buffer.clear()
            self.flushed_at = now


class RecordRelay:
    """Reads one rank's records and output, and gives them to the sender.

    Attributes:
        open: control socket and output, while the rank or a process that it started holds the other end.
        unacknowledged: bytes that were sent, or wait to be sent, and that the client has not acknowledged.
        end: the rank's end record. It is not passed on: the worker's task sends it when the process has ended.
        tail: the last output of the rank.
        captured: a copy of the output since this was set to b""; None before.
    """

    def __init__(self, sender: RecordSender, spec: RankSpec, selector: selectors.BaseSelector) -> None:
        self.sender, self.spec, self.selector = sender, spec, selector
        self.readers: dict[socket.socket | int, Callable[[], None]] = {}
        self.open: set[socket.socket | int] = set()
        self.unacknowledged = 0
        self.end: End | None = None
        self.tail = b""
        self.captured: bytes | None = None
        self.parts: list[bytes] = []  # of a line whose end has not come yet
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a chunk may end within a character

    def start(self, control: socket.socket, output: int) -> None:
        self.control, self.output = control, output
        self.readers = {control: self._read_records, output: self._read_output}
        self.open = set(self.readers)
        self._update_selector()

    @property
    def is_blocked(self) -> bool:
        """Return whether the client is behind, so that the rank is not read."""
        return self.unacknowledged >= WINDOW_BYTES

    def acknowledge(self, size: int) -> None:
        self.unacknowledged -= size
        self._update_selector()

    def log(self, text: str) -> None:
        self._forward(Record(Log(text), self.spec.rank, None, time.time(), self.sender.attempt).encode())

    def log_sentence(self, sentence: str) -> None:
        newline = "" if self.tail.endswith(b"\n") or not self.tail else "\n"
        self.log(f"{newline}rank {self.spec.rank} of {self.spec.world_size}: {sentence}\n")

    def close(self) -> None:
        self.open.clear()
        self._update_selector()

    def _read_records(self) -> None:
        try:
            data = self.control.recv(2**18)
        except ConnectionResetError:
            data = b""
        if not data:
            self._close(self.control)
            return
        if b"\n" not in data:
            self.parts.append(data)
            return
        *lines, rest = b"".join([*self.parts, data]).split(b"\n")
        self.parts = [rest]
        for line in lines:
            if begins(line, End) and isinstance(end := Record.decode(line).data, End):
                self.end = end
            else:
                self._forward(line)

    def _read_output(self) -> None:
        chunk = os.read(self.output, 65536)
        if not chunk:
            self._close(self.output)
            return
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        if self.captured is not None:
            self.captured += chunk
        self.log(self.decoder.decode(chunk))

    def _forward(self, record: bytes) -> None:
        self.sender.buffer.append(record)
        self.unacknowledged += len(record)
        self._update_selector()

    def _close(self, source: socket.socket | int) -> None:
        self.open.discard(source)
        self._update_selector()

    def _update_selector(self) -> None:
        """Wait for the open sources, unless the client is behind."""
        wanted = set() if self.is_blocked else self.open
        registered = self.selector.get_map()
        for source, read in self.readers.items():
            if source in wanted and source not in registered:
                self.selector.register(source, selectors.EVENT_READ, read)
            elif source not in wanted and source in registered:
                self.selector.unregister(source)
