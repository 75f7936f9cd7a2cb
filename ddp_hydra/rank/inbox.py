"""Messages of the client for a rank task that runs.

The client reaches a worker with `client.run`, which executes on the worker's event loop; the rank task runs in another
thread. An inbox carries messages from one to the other. Messages may be put into it before its task exists.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
_boxes: OrderedDict[tuple[str, int], Inbox] = OrderedDict()
_lock = threading.Lock()
MAX_BOXES = 256
"""Number of inboxes without a task that are kept; the oldest are dropped first."""
_ended: deque[tuple[str, int]] = deque(maxlen=MAX_BOXES)
"""Ranks that have ended here; messages that still come for them are dropped."""


class Inbox:
    """A queue with a file descriptor to wait on.

    Attributes:
        has_reader: a rank task reads it.
    """

    def __init__(self) -> None:
        self.has_reader = False
        self.messages: deque[Message] = deque()
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)

    def put(self, message: Message) -> None:
        """Add a message and wake the reader."""
        self.messages.append(message)
        with contextlib.suppress(OSError):  # full: the reader is awake; closed: there is none
            self.writer.send(b"!")

    def take(self) -> list[Message]:
        """Remove all messages, and return them."""
        with contextlib.suppress(BlockingIOError):
            self.reader.recv(4096)
        taken = []
        while self.messages:
            taken.append(self.messages.popleft())
        return taken

    def fileno(self) -> int:
        """Return the descriptor for selectors."""
        return self.reader.fileno()

    def close(self) -> None:
        """Close both ends."""
        self.reader.close()
        self.writer.close()


def deliver(gang: str, messages: Mapping[str, tuple[int, Message]], dask_worker: Any = None) -> None:
    """Deliver the message for a rank of this worker. Runs on the worker, called by the client.

    Args:
        gang: the gang's name, with its attempt.
        messages: worker address -> rank and message.
        dask_worker: passed by Dask.
    """
    rank, message = messages[dask_worker.address]
    with _lock:
        box = None if (gang, rank) in _ended else _box(gang, rank)
    if box is not None:
        box.put(message)


def send_to_all(message: Message) -> list[tuple[str, int]]:
    """Deliver a message to every rank of this worker; return those ranks."""
    with _lock:
        here = {rank: box for rank, box in _boxes.items() if box.has_reader}
    for box in here.values():
        box.put(message)
    return list(here)


def has_any(ranks: list[tuple[str, int]]) -> bool:
    """Return whether some of these ranks are still here."""
    with _lock:
        return any(rank in _boxes for rank in ranks)


def of_rank(gang: str, rank: int) -> Inbox:
    """Return the inbox of a rank, for its task; create it if it does not exist yet."""
    with _lock:
        found = _box(gang, rank)
        found.has_reader = True
        return found


def _box(gang: str, rank: int) -> Inbox:
    if (gang, rank) not in _boxes:
        unread = [key for key, box in _boxes.items() if not box.has_reader]
        for key in unread[: max(0, len(unread) - MAX_BOXES + 1)]:
            _boxes.pop(key).close()
        _boxes[gang, rank] = Inbox()
    return _boxes[gang, rank]


def remove(gang: str, rank: int) -> None:
    """Close the inbox of a rank that has ended."""
    with _lock:
        _ended.append((gang, rank))
        gone = _boxes.pop((gang, rank), None)
    if gone is not None:
        gone.close()
