"""What torch's DataLoader needs of multiprocessing: processes that the helper forks, queues and an event.

They need neither named semaphores nor a process that tracks them, so a rank that is killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import queue
import resource
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing import context, process, reduction
from pathlib import Path
from typing import Any

from ddp_hydra.data.workers import helper

_EXIT = struct.Struct("<q")
_IN_DATAGRAM = 1024
"""Bytes of an item that travel in the datagram itself."""
_MOST_FDS = 200
"""Descriptors of an item."""


def anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"ddp_hydra-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


set_spawning_popen: Any = context.set_spawning_popen


class Descriptor:
    """Stands for a descriptor that travels to a worker.

    Args:
        number: in the list of those that the worker inherits.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        return helper.inherited(self.number)


class Popen:
    """Starts a process by the helper, and waits for its end.

    Args:
        process_obj: the process object.
    """

    method = "helper"
    DupFd = Descriptor

    def __init__(self, process_obj: process.BaseProcess) -> None:
        self.returncode: int | None = None
        self.fds: list[int] = list(process_obj.files)  # type: ignore[attr-defined]
        buffer = io.BytesIO()
        prepared = {"path": sys.path, "environment": dict(os.environ), "cwd": str(Path.cwd()), "files": self.fds[:]}
        set_spawning_popen(self)
        try:
            reduction.dump(prepared, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        payload = anonymous_file("worker")
        self.sentinel, exit_code = os.pipe()
        try:
            with open(payload, "wb", closefd=False) as file:
                file.write(buffer.getbuffer())
            self.pid = process_obj.helper.fork(payload, exit_code, self.fds)  # type: ignore[attr-defined]
        finally:
            os.close(payload)
            os.close(exit_code)

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        # Return the exit code; None while the process runs.
        timeout = 0 if flag == os.WNOHANG else None
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> int | None:
        # Wait for the end of the process, and return its exit code; None if it still runs.
        if self.returncode is None and _readable(self.sentinel, timeout):
            told = os.read(self.sentinel, _EXIT.size)
            self.returncode = _EXIT.unpack(told)[0] if len(told) == _EXIT.size else 255  # the helper has ended
        return self.returncode

    def terminate(self) -> None:
        # Kill the process: a worker ignores SIGTERM, as it goes to the rank's whole group.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)

    kill = terminate

    def close(self) -> None:
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    def __del__(self) -> None:
        self.close()


def _readable(fd: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else max(0, timeout) * 1000))


class Queue:
    """A queue with many writers and one reader, which also carries descriptors.

    An item is one datagram, which arrives whole or not at all: of one that was cut off by the end of its writer, the
    reader would wait for the rest for ever, or take the next writer's item for it. What is too large for a datagram
    is in a file that goes along. In a worker, a thread writes: a worker that waited for the rank to read, while the
    rank waits for it, would wait for ever.
    """

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair(type=socket.SOCK_DGRAM)
        self.waiting: queue.SimpleQueue[Any] | None = None

    def __getstate__(self) -> tuple[Any, Any]:
        return reduction.DupFd(self.reader.fileno()), reduction.DupFd(self.writer.fileno())

    def __setstate__(self, fds: tuple[Any, Any]) -> None:
        self.reader, self.writer = (socket.socket(fileno=fd.detach()) for fd in fds)
        self.waiting = queue.SimpleQueue()
        threading.Thread(target=self._write_all, name="worker-queue", daemon=True).start()

    def put(self, item: Any) -> None:
        carried = _DescriptorList()
        set_spawning_popen(carried)
        try:
            data = bytes(reduction.ForkingPickler.dumps(item))
        finally:
            set_spawning_popen(None)
        if self.waiting is None:
            self._write(data, carried.fds)
        else:
            self.waiting.put((data, carried.fds))

    def _write_all(self) -> None:
        assert self.waiting is not None
        with contextlib.suppress(ConnectionError):  # the rank has ended
            while True:
                self._write(*self.waiting.get())

    def _write(self, data: bytes, fds: list[int]) -> None:
        try:
            if in_file := len(data) > _IN_DATAGRAM:
                fds.append(anonymous_file("item"))
                with open(fds[-1], "wb", closefd=False) as file:
                    file.write(data)
            socket.send_fds(self.writer, [bytes([in_file]) + (b"" if in_file else data)], fds)
        finally:
            for fd in fds:
                os.close(fd)

    def get(self, timeout: float | None = None) -> Any:
        if not _readable(self.reader.fileno(), timeout):
            raise queue.Empty
        data, fds, flags, _ = socket.recv_fds(self.reader, 1 + _IN_DATAGRAM, _MOST_FDS)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, f"this process may open {_most_files()} files, too few for batches of workers")
        if data[0]:
            with os.fdopen(fds.pop(), "rb") as file:
                file.seek(0)
                data = file.read()
        else:
            data = data[1:]
        _received.fds = fds
        return reduction.ForkingPickler.loads(data)

    def cancel_join_thread(self) -> None:
        """Do nothing: nobody waits for the thread."""

    def close(self) -> None:
        """Do nothing: the descriptors are closed with this object."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.reader.close()
            self.writer.close()


_received = threading.local()


class _ReceivedFd:
    """Stands for a descriptor in a message.

    Args:
        number: in the message.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        return int(_received.fds[self.number])


class _DescriptorList:
    """Takes up the descriptors in an item that is pickled."""

    DupFd = _ReceivedFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1


class Event:
    """A flag that several processes see."""

    def __init__(self) -> None:
        self._open(anonymous_file("event"))
        os.ftruncate(self.fd, 1)
        self.memory = mmap.mmap(self.fd, 1)

    def _open(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, fd: Any) -> None:
        self._open(fd.detach())
        self.memory = mmap.mmap(self.fd, 1)

    def set(self) -> None:
        self.memory[0] = 1

    def is_set(self) -> bool:
        return bool(self.memory[0])

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.memory.close()
            os.close(self.fd)


class WorkerProcess(process.BaseProcess):
    """A process that the helper forks."""

    _start_method = None
    helper: helper.Helper
    files: Sequence[int]

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  as multiprocessing calls it
        return Popen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "helper"}


class HelperContext(context.BaseContext):
    """Starts processes by a helper.

    Args:
        forked_from: the helper.
        files: descriptors that the processes have, too, under the same numbers.

    Attributes:
        started: the processes that were started.
    """

    _name = "helper"

    def __init__(self, forked_from: helper.Helper, files: Sequence[int] = ()) -> None:
        self.helper, self.files = forked_from, files
        self.started: list[WorkerProcess] = []
        _allow_many_files()

    def Process(self, *args: Any, **options: Any) -> WorkerProcess:  # noqa: N802
        made = WorkerProcess(*args, **options)
        made.helper, made.files = self.helper, self.files
        self.started.append(made)
        return made

    def Queue(self, maxsize: int = 0) -> Queue:  # type: ignore[override]  # noqa: N802
        return Queue()

    def Event(self) -> Event:  # type: ignore[override]  # noqa: N802
        return Event()

    def exit_codes(self, wait_s: float = 1.0) -> list[int]:
        until = time.monotonic() + wait_s
        while not (codes := [p.exitcode for p in self.started if p.exitcode is not None]) and time.monotonic() < until:
            time.sleep(0.01)
        return codes


def _allow_many_files() -> None:
    # Let this process open as many files as it may: each batch that comes back is one until it is dropped.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _most_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
