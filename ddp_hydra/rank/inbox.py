"""Messages of the client for a worker's task that runs ranks.

The client reaches a worker with `client.run`, which executes on the worker's event loop; the task runs in another
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
Key = tuple[str, str]
"""The gang's name, with its attempt, and the worker's address: several workers may live in one process."""
_boxes: OrderedDict[Key, Inbox] = OrderedDict()
_lock = threading.Lock()
MAX_BOXES = 256
"""Number of inboxes without a task that are kept; the oldest are dropped first."""
_ended: deque[Key] = deque(maxlen=MAX_BOXES)
"""Tasks that have ended here; messages that still come for them are dropped."""


class Inbox:
    """A queue with a file descriptor to wait on.

    Attributes:
        has_reader: a task reads it.
    """

    def __init__(self) -> None:
        self.has_reader = False
        self.messages: deque[tuple[int | None, Message]] = deque()
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)

    def put(self, message: Message, rank: int | None = None) -> None:
        """Add a message and wake the reader.

        Args:
            message: for the task.
            rank: that it is about; None for all ranks of the task.
        """
        self.messages.append((rank, message))
        with contextlib.suppress(OSError):  # full: the reader is awake; closed: there is none
            self.writer.send(b"!")

    def take(self) -> list[tuple[int | None, Message]]:
        """Remove all messages, and return them with their ranks."""
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


def deliver(gang: str, rank: int | None, message: Message, dask_worker: Any = None) -> None:
    """Deliver a message to the ranks of a gang on this worker. Runs on the worker, called by the client.

    Args:
        gang: the gang's name, with its attempt.
        rank: that the message is for; None for all on this worker.
        message: for the worker's task.
        dask_worker: passed by Dask.
    """
    key = gang, dask_worker.address
    with _lock:
        box = None if key in _ended else _box(key)
    if box is not None:
        box.put(message, rank)


def send_to_worker(worker: str, message: Message) -> list[Key]:
    """Deliver a message to all ranks of a worker; return the tasks that run them."""
    with _lock:
        here = {key: box for key, box in _boxes.items() if box.has_reader and key[1] == worker}
    for box in here.values():
        box.put(message)
    return list(here)


def has_any(tasks: list[Key]) -> bool:
    """Return whether some of these tasks are still here."""
    with _lock:
        return any(key in _boxes for key in tasks)


def of_task(gang: str, worker: str) -> Inbox:
    """Return the inbox of a gang's task on a worker, for this task; create it if it does not exist yet."""
    with _lock:
        found = _box((gang, worker))
        found.has_reader = True
        return found


def _box(key: Key) -> Inbox:
    if key not in _boxes:
        unread = [other for other, box in _boxes.items() if not box.has_reader]
        for other in unread[: max(0, len(unread) - MAX_BOXES + 1)]:
            _boxes.pop(other).close()
        _boxes[key] = Inbox()
    return _boxes[key]


def remove(gang: str, worker: str) -> None:
    """Close the inbox of a task that has ended."""
    with _lock:
        _ended.append((gang, worker))
        gone = _boxes.pop((gang, worker), None)
    if gone is not None:
        gone.close()
