"""Messages of the client for a worker's task that runs ranks.

The client reaches a worker with `client.run`, which executes on the worker's event loop; the task runs in another
thread. An inbox carries messages from one to the other. Messages may be put into it before its task exists.

A worker that is shut down tells its tasks, so that ranks finish. Before a machine is taken away (a spot instance, a
drained node, the end of a batch job), SIGTERM is sent to the nanny, which closes its worker, or to every process of the
host. Dask closes a worker's plugins before its connections. In that time the gang writes a checkpoint and the client
fetches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from distributed import Worker, WorkerPlugin

from ddp_hydra.rank import outbox

Message = Mapping[str, Any]
Key = tuple[str, str]
"""The gang's name and the worker's address: several workers may live in one process."""
Letter = tuple[int | None, int | None, Message]
"""The gang's attempt (None: any), the rank (None: all of the task), and a message about them."""
_boxes: OrderedDict[Key, Inbox] = OrderedDict()
_lock = threading.Lock()
MAX_BOXES = 256
"""Number of inboxes without a task that are kept; the oldest are dropped first."""
_ended: OrderedDict[Key, int] = OrderedDict()
"""The last attempt of each task that has ended here; messages that still come about it are dropped."""


class Inbox:
    """A queue with a file descriptor to wait on."""

    def __init__(self) -> None:
        self.has_reader = False
        self.messages: deque[Letter] = deque()
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)

    def put(self, message: Message, rank: int | None = None, attempt: int | None = None) -> None:
        """Add a message about a rank (None: all) in an attempt (None: any), and wake the reader."""
        self.messages.append((attempt, rank, message))
        with contextlib.suppress(OSError):  # full: the reader is awake; closed: there is none
            self.writer.send(b"!")

    def take(self, attempt: int) -> list[tuple[int | None, Message]]:
        """Remove the messages about an attempt, and return them with their ranks.

        Those about earlier attempts came too late, and are dropped; those about later ones stay, and wake nobody.
        """
        with contextlib.suppress(BlockingIOError):
            self.reader.recv(4096)
        taken, later = [], []
        while self.messages:
            letter = about, rank, message = self.messages.popleft()
            if about is None or about == attempt:
                taken.append((rank, message))
            elif about > attempt:
                later.append(letter)
        self.messages.extendleft(reversed(later))
        return taken

    def fileno(self) -> int:
        return self.reader.fileno()

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


def deliver(gang: str, attempt: int, rank: int | None, message: Message, dask_worker: Any = None) -> bool:
    """Deliver a message to a gang's task on this worker; return whether that is there. Called by the client.

    Args:
        gang: the gang's name, without its attempt.
        rank: that the message is about; None for all on this worker.
    """
    key = gang, dask_worker.address
    with _lock:
        box = None if attempt <= _ended.get(key, -1) else _box(key)
    if box is not None:
        box.put(message, rank, attempt)
    return box is not None and box.has_reader


def send_to_worker(worker: str, message: Message) -> list[Key]:
    """Deliver a message to all ranks of a worker; return the tasks that run them."""
    with _lock:
        here = {key: box for key, box in _boxes.items() if box.has_reader and key[1] == worker}
    for box in here.values():
        box.put(message)
    return list(here)


def has_any(tasks: list[Key]) -> bool:
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


def remove(gang: str, worker: str, attempt: int) -> None:
    with _lock:
        _ended[gang, worker] = attempt
        while len(_ended) > MAX_BOXES:
            _ended.popitem(last=False)
        gone = _boxes.pop((gang, worker), None)
    if gone is not None:
        gone.close()


NAME = "ddp_hydra-preemption"
GRACE_S = 7.0
"""Seconds that ranks may take to finish. `dask worker` kills workers that have not closed after 8 s."""
SEND_S = 0.5
"""Seconds that the last records may take to be sent."""


class PreemptionPlugin(WorkerPlugin):
    """Delays the closing of a worker until its ranks have ended and their files are fetched.

    If the worker has lost its scheduler, nobody would fetch the files, so the ranks end at once.
    """

    async def teardown(self, worker: Worker) -> None:
        """Wait for the ranks; called by Dask when the worker closes."""
        stream = worker.batched_stream
        if stream is not None and not stream.closed():
            deadline = time.monotonic() + GRACE_S
            tasks = send_to_worker(worker.address, {"preempted": True})
            while tasks and time.monotonic() < deadline and (has_any(tasks) or outbox.has_files(worker)):
                await asyncio.sleep(0.05)
            if tasks:
                await _wait_until_sent(stream, until=time.monotonic() + SEND_S)
        send_to_worker(worker.address, {"stop": True})  # Dask would wait half a minute for their tasks


async def _wait_until_sent(stream: Any, until: float) -> None:
    """Wait until the last records of the ranks are sent: a worker that is killed loses the others."""
    await asyncio.sleep(0.01)  # this loop hands the records of other threads to the stream
    while (stream.buffer or stream.next_deadline) and not stream.closed() and time.monotonic() < until:
        await asyncio.sleep(0.01)


def prepare(worker: Worker) -> None:
    """Install the plugin on a worker; called from the thread of a task."""
    worker.loop.add_callback(_prepare, worker)


async def _prepare(worker: Worker) -> None:
    if NAME in worker.plugins:
        return
    await worker.plugin_add(plugin=PreemptionPlugin(), name=NAME)
    if urlsplit(worker.scheduler.address).hostname in ("127.0.0.1", "::1"):
        for name in ("distributed.worker", "distributed.worker.state_machine"):
            logging.getLogger(name).addFilter(is_worth_logging)
    # Under a nanny, SIGTERM would end the worker at once. Other programs' handlers are left alone.
    if worker.nanny and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not the main thread
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, lambda: loop.create_task(_finish_and_die(worker)))


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Drop messages about lost heartbeats and cancelled tasks: a local cluster ends with the command."""
    return not any(words in str(record.msg) for words in ("scheduler during heartbeat", "Async instruction for"))


async def _finish_and_die(worker: Worker) -> None:
    await PreemptionPlugin().teardown(worker)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
