"""What the client tells the relay of a rank while it runs.

The client reaches a worker with `client.run`, which executes on the worker's event loop; the relay waits in a
task's thread. A mailbox carries messages from one to the other. It may be written before its relay exists.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
_boxes: OrderedDict[tuple[str, int], Mailbox] = OrderedDict()
_lock = threading.Lock()
MAX_BOXES = 256
"""Letters to ranks that never come are forgotten, the oldest first."""
_ended: deque[tuple[str, int]] = deque(maxlen=MAX_BOXES)
"""Ranks that have been here; what still comes for them is thrown away."""


class Mailbox:
    """A queue with a file descriptor to wait on.

    Attributes:
        manned: a relay is here to read it.
    """

    def __init__(self) -> None:
        self.manned = False
        self.messages: deque[Message] = deque()
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)

    def put(self, message: Message) -> None:
        """Leave a message and wake the reader."""
        self.messages.append(message)
        with contextlib.suppress(OSError):  # full, so the reader is awake already; or closed, so there is none
            self.writer.send(b"!")

    def take(self) -> list[Message]:
        """All messages there are."""
        with contextlib.suppress(BlockingIOError):
            self.reader.recv(4096)
        taken = []
        while self.messages:
            taken.append(self.messages.popleft())
        return taken

    def fileno(self) -> int:
        """For selectors."""
        return self.reader.fileno()

    def close(self) -> None:
        """Close both ends."""
        self.reader.close()
        self.writer.close()


def deliver(gang: str, letters: Mapping[str, tuple[int, Message]], dask_worker: Any = None) -> None:
    """Leave the message that is for a rank of this worker. Runs on the worker, called by the client.

    Args:
        gang: the gang's name, with its attempt.
        letters: worker address -> rank and message.
        dask_worker: given by Dask.
    """
    rank, message = letters[dask_worker.address]
    with _lock:
        mailbox = None if (gang, rank) in _ended else _box(gang, rank)
    if mailbox is not None:
        mailbox.put(message)


def tell_all(message: Message) -> list[tuple[str, int]]:
    """Leave a message for every rank of this worker; returns which there are."""
    with _lock:
        here = {who: mailbox for who, mailbox in _boxes.items() if mailbox.manned}
    for mailbox in here.values():
        mailbox.put(message)
    return list(here)


def has_any(ranks: list[tuple[str, int]]) -> bool:
    """Whether some of these ranks are still here."""
    with _lock:
        return any(rank in _boxes for rank in ranks)


def box(gang: str, rank: int) -> Mailbox:
    """The mailbox of a rank, for its relay; made where it does not exist yet."""
    with _lock:
        found = _box(gang, rank)
        found.manned = True
        return found


def _box(gang: str, rank: int) -> Mailbox:
    if (gang, rank) not in _boxes:
        unread = [who for who, mailbox in _boxes.items() if not mailbox.manned]
        for who in unread[: max(0, len(unread) - MAX_BOXES + 1)]:
            _boxes.pop(who).close()
        _boxes[gang, rank] = Mailbox()
    return _boxes[gang, rank]


def remove(gang: str, rank: int) -> None:
    """Close the mailbox of a rank that has ended."""
    with _lock:
        _ended.append((gang, rank))
        gone = _boxes.pop((gang, rank), None)
    if gone is not None:
        gone.close()
