"""A process that forks workers on request, and says how they ended.

A request is a message with descriptors, as items of the workers' queues are, too. The answer is a number: the worker's
process id, or its exit code. The helper ends when its socket is closed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import resource
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ddp_hydra import forked
from ddp_hydra.console.signals import SIGNALS, held_back
from ddp_hydra.heartbeat import file_in_memory

MOST_FDS = 200
"""Descriptors of one message."""
_IN_MESSAGE = 1024
"""Bytes that travel in the message itself."""
MOST_FILES = 40
"""Files that a data set has open."""
RUNS = 1 << 32
"""In place of the exit code of a worker that has not ended."""
_ANSWER = struct.Struct("<q")
_travelling = threading.local()
_current: Callable[[], Helper | None] = lambda: None  # noqa: E731
_lock = threading.Lock()


class Fd:
    """A descriptor that travels with the message in which it is pickled, and arrives as a number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        _travelling.fds.append(os.dup(self.fd))
        return _arrived, (len(_travelling.fds) - 1,)


def _arrived(number: int) -> int:
    return int(_travelling.fds[number])


def packed(item: Any) -> tuple[bytes, list[int]]:
    _travelling.fds = []
    return pickle.dumps(item), _travelling.fds


def unpacked(data: bytes, fds: list[int]) -> Any:
    _travelling.fds = fds
    return pickle.loads(data)  # noqa: S301  from a process that this one has started, or that has started this one


def send(to: socket.socket, data: bytes, fds: list[int]) -> None:
    # Send a message whole or not at all, and close its descriptors: of one that was cut off by the end of its writer,
    # the reader would wait for the rest for ever, or take the next writer's message for it. A large one is in a file.
    try:
        if in_file := len(data) > _IN_MESSAGE:
            fds.append(file_in_memory("ddp_hydra-message"))
            with open(fds[-1], "wb", closefd=False) as file:
                file.write(data)
        socket.send_fds(to, [bytes([in_file]) + (b"" if in_file else data)], fds)
    finally:
        for fd in fds:
            os.close(fd)


def receive(sender: socket.socket) -> tuple[bytes, list[int]]:
    # Raises: EOFError: the other end is closed.
    message, fds, flags, _ = socket.recv_fds(sender, 1 + _IN_MESSAGE, MOST_FDS)
    if not message:
        raise EOFError
    if flags & socket.MSG_CTRUNC:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(errno.EMFILE, f"this process may open {most} files, too few for batches of workers")
    if not message[0]:
        return message[1:], fds
    with os.fdopen(fds.pop(), "rb") as file:
        file.seek(0)
        return file.read(), fds


class Helper:
    """The helper, as the process sees it that has taken it. It ends with this process, or with its last user."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests, self.owner, self.asking = requests, os.getpid(), threading.Lock()
        self.has_ended = False

    def fork(self, work: Any, files: list[int]) -> int:
        # files: descriptors that the process has, too, under the same numbers, unless they were closed since.
        files = sorted(open_files().intersection(files))
        process, fds = packed(work)
        prepared = {"path": sys.path, "environment": dict(os.environ), "cwd": str(Path.cwd()), "files": files}
        pid = self._ask((prepared, process), [*map(os.dup, files), *fds])
        if pid < 0:
            raise ConnectionError(f"this host lets a rank start no process: {os.strerror(-pid)}")
        return pid

    def exit_code(self, pid: int) -> int | None:
        code = self._ask(pid, [])
        return None if code == RUNS else code

    def _ask(self, request: Any, fds: list[int]) -> int:
        try:
            with self.asking:
                send(self.requests, pickle.dumps(request), fds)
                answer = self.requests.recv(_ANSWER.size, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        if len(answer) != _ANSWER.size:
            self.has_ended = True
            raise ConnectionError("the process that starts the workers of this rank has ended (killed, or no memory)")
        return int(_ANSWER.unpack(answer)[0])


def take_helper() -> None:
    # Fork the helper of this process: call this before there are threads, a process group or a GPU.
    global _current
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):  # what waits there would be printed by the workers, too
        stream.flush()
    if os.fork() == 0:
        _serve_alone(theirs)
    theirs.close()
    helper = Helper(ours)
    _current = lambda: helper  # noqa: E731


def current() -> Helper:
    # Return the helper of this process; without one, start a program that imports torch, which takes seconds.
    global _current
    with _lock:
        helper = _current()
        if helper is None or helper.owner != os.getpid() or helper.has_ended:
            ours, program = forked.start_program(__name__)
            helper = Helper(ours)
            weakref.finalize(helper, _end, ours, program)
            _current = weakref.ref(helper)
        return helper


def _end(requests: socket.socket, program: subprocess.Popen[bytes]) -> None:
    requests.close()
    program.wait()


def open_files() -> set[int]:
    found = set()
    with contextlib.suppress(FileNotFoundError):  # a system without /proc
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if path.is_file() and not str(path.readlink()).startswith("/memfd:"):
                    found.add(int(path.name))
    return found


# -- in the helper ---------------------------------------------------------------------------------------------------


def _serve_alone(requests: socket.socket) -> NoReturn:
    keep = requests.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX") if sys.platform != "linux" else 2**20)
    forked.run_and_exit(partial(serve, requests))


def serve(requests: socket.socket) -> int:
    forked.ignore_signals()  # they go to the whole group; the rank decides
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            data, fds = receive(requests)
            request: Any = pickle.loads(data)  # noqa: S301  from the process that started this one
            answer = _exit_code(request) if isinstance(request, int) else _fork(request[0], request[1], fds, requests)
            for fd in fds:
                os.close(fd)
            requests.sendall(_ANSWER.pack(answer))
    return 0


def _exit_code(pid: int) -> int:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 255
    return os.waitstatus_to_exitcode(status) if ended else RUNS


def _fork(prepared: dict[str, Any], process: bytes, fds: list[int], requests: socket.socket) -> int:
    try:
        with held_back(SIGNALS):
            if not (pid := os.fork()):
                forked.ignore_signals()
    except OSError as error:
        return -(error.errno or 1)
    if not pid:
        requests.close()
        forked.run_and_exit(partial(_work, prepared, process, fds))
    return pid


def _work(prepared: dict[str, Any], process: bytes, fds: list[int]) -> int:
    sys.path[:] = prepared["path"]
    os.environ.clear()
    os.environ.update(prepared["environment"])
    with contextlib.suppress(OSError):
        os.chdir(prepared["cwd"])
    files = prepared["files"]
    free = max(files, default=2) + 1
    for place, fd in enumerate(fds):
        fds[place] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free)
        os.close(fd)
    for number, fd in zip(files, fds, strict=False):
        os.dup2(fd, number, inheritable=False)
        os.close(fd)
    function, arguments = unpacked(process, fds[len(files) :])
    function(*arguments)
    return 0


def main() -> NoReturn:
    # Import torch, and serve: the program that `current` starts.
    requests = socket.socket(fileno=int(sys.argv[1]))
    import torch.utils.data  # noqa: F401

    forked.run_and_exit(partial(serve, requests))
