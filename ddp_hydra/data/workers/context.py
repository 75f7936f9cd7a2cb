"""What torch's DataLoader needs of multiprocessing: processes that the helper forks, queues and an event.

They need neither named semaphores nor a process that tracks them, so a rank that is killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import context
from typing import Any

from ddp_hydra.data.workers.helper import Fd, Helper, packed, receive, send, unpacked

HELPER_LOST = 1000
"""Exit code of a process whose helper, which alone knows its own, has ended."""


class _SocketPair:
    """Two ends of a socket, which travel to workers."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair(type=socket.SOCK_DGRAM)

    def __getstate__(self) -> tuple[Any, Any]:
        return Fd(self.reader.fileno()), Fd(self.writer.fileno())

    def __setstate__(self, fds: tuple[int, int]) -> None:
        self.reader, self.writer = (socket.socket(fileno=fd) for fd in fds)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.reader.close()
            self.writer.close()

    def is_readable(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(0, timeout) * 1000))


class Queue(_SocketPair):
    """A queue with many writers and one reader, which also carries descriptors.

    In a worker, a thread writes: a worker that waited for the rank to read, while the rank waits for it, would wait for
    ever.
    """

    waiting: queue.SimpleQueue[Any] | None = None

    def __setstate__(self, fds: tuple[int, int]) -> None:
        super().__setstate__(fds)
        self.waiting = queue.SimpleQueue()
        threading.Thread(target=self._write_all, name="worker-queue", daemon=True).start()

    def put(self, item: Any) -> None:
        message = packed(item)
        if self.waiting is None:
            send(self.writer, *message)
        else:
            self.waiting.put(message)

    def _write_all(self) -> None:
        assert self.waiting is not None
        with contextlib.suppress(ConnectionError):  # the rank has ended
            while True:
                send(self.writer, *self.waiting.get())

    def get(self, timeout: float | None = None) -> Any:
        if not self.is_readable(timeout):
            raise queue.Empty
        return unpacked(*receive(self.reader))

    def cancel_join_thread(self) -> None:
        """Do nothing: nobody waits for the thread, and the descriptors are closed with this object."""

    close = cancel_join_thread


class Event(_SocketPair):
    """A flag that several processes see."""

    def set(self) -> None:
        self.writer.send(b".")

    def is_set(self) -> bool:
        return self.is_readable(0)


class WorkerProcess:
    """A process that the helper forks, with the methods of multiprocessing's."""

    def __init__(self, helper: Helper, files: Sequence[int], target: Callable[..., Any], args: Sequence[Any]) -> None:
        self.helper, self.files, self.work = helper, list(files), (target, args)
        self.pid = 0
        self._exitcode: int | None = None

    def start(self) -> None:
        self.pid = self.helper.fork(self.work, self.files)

    @property
    def exitcode(self) -> int | None:
        if self._exitcode is None:
            try:
                self._exitcode = self.helper.exit_code(self.pid)
            except ConnectionError:
                self._exitcode = HELPER_LOST
        return self._exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self.exitcode is None and time.monotonic() < until:
            time.sleep(0.005)

    def terminate(self) -> None:
        # Kill the process: a worker ignores SIGTERM, as it goes to the rank's whole group.
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class HelperContext(context.BaseContext):
    """Starts processes by a helper; they have `files` under the same numbers."""

    _name = "helper"

    def __init__(self, helper: Helper, files: Sequence[int]) -> None:
        self.helper, self.files = helper, files
        self.started: list[WorkerProcess] = []
        # Each batch that comes back is an open file until it is dropped.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def Process(self, target: Callable[..., Any], args: Sequence[Any]) -> WorkerProcess:  # noqa: N802
        self.started.append(WorkerProcess(self.helper, self.files, target, args))
        return self.started[-1]

    def Queue(self, maxsize: int = 0) -> Queue:  # type: ignore[override]  # noqa: N802
        return Queue()

    def Event(self) -> Event:  # type: ignore[override]  # noqa: N802
        return Event()

    def exit_codes(self, wait_s: float = 1.0) -> list[int]:
        until = time.monotonic() + wait_s
        while not (codes := [p.exitcode for p in self.started if p.exitcode is not None]) and time.monotonic() < until:
            time.sleep(0.01)
        return codes
