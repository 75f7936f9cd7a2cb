"""A process that forks workers on request, and says how they ended.

A request is a message with descriptors: the file of the pickled process object, the pipe for the exit code, then those
of the object itself. The answer is the worker's process id. It ends when its socket is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ddp_hydra import forked

MOST_FDS = 64
"""Descriptors of one request."""
MOST_FILES = 40
"""Files among them that a data set has open."""
_PID = struct.Struct("<q")
_inherited: list[int] = []
_current: Helper | None = None
_lock = threading.Lock()


class Helper:
    """The helper, as the process sees it that has taken it.

    Args:
        requests: the socket to it.
        pid: of its process.
    """

    def __init__(self, requests: socket.socket, pid: int) -> None:
        self.requests, self.pid = requests, pid
        self.owner = os.getpid()
        self.sending = threading.Lock()
        self.users = 0

    def fork(self, payload: int, exit_code: int, fds: list[int]) -> int:
        try:
            with self.sending:
                socket.send_fds(self.requests, [b"f"], [payload, exit_code, *fds])
                answer = self.requests.recv(_PID.size, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        if len(answer) != _PID.size:
            raise ConnectionError("the process that starts the workers of this rank has ended (killed, or no memory)")
        (pid,) = _PID.unpack(answer)
        if pid < 0:
            raise ConnectionError(f"this host lets a rank start no process: {os.strerror(-pid)}")
        return int(pid)

    def close(self) -> None:
        self.requests.close()
        with contextlib.suppress(ChildProcessError):  # the user's code has waited for all children
            os.waitpid(self.pid, 0)


def take_helper() -> None:
    # Fork the helper of this process: call this before there are threads, a process group or a GPU.
    global _current
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):  # what waits there would be printed by the workers, too
        stream.flush()
    pid = os.fork()
    if pid == 0:
        _serve_alone(theirs)
    theirs.close()
    _current = Helper(ours, pid)
    _current.users = 1  # it stays as long as this process


def acquire() -> Helper:
    # Return the helper of this process; without one, start a program that imports torch, which takes seconds.
    global _current
    with _lock:
        if _current is None or _current.owner != os.getpid():
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())]
                path = os.pathsep.join(filter(None, sys.path))
                program = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path})
            _current = Helper(ours, program.pid)
            program.returncode = 0  # `close` waits for it
        _current.users += 1
        return _current


def release(helper: Helper) -> None:
    global _current
    with _lock:
        helper.users -= 1
        if not helper.users:
            helper.close()
            _current = None


def open_files() -> set[int]:
    found = set()
    with contextlib.suppress(FileNotFoundError):  # a system without /proc
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if path.is_file() and not str(path.readlink()).startswith("/memfd:"):
                    found.add(int(path.name))
    return found


def inherited(number: int) -> int:
    return _inherited[number]


# -- in the helper ---------------------------------------------------------------------------------------------------


def _serve_alone(requests: socket.socket) -> NoReturn:
    def work() -> int:
        keep = requests.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX") if sys.platform != "linux" else 2**20)
        serve(requests)
        return 0

    forked.run_and_exit(work)


def serve(requests: socket.socket) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they go to the whole group; the rank decides
        signal.signal(number, signal.SIG_IGN)
    wake_r, wake_w = socket.socketpair()
    for end in (wake_r, wake_w):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w.fileno(), warn_on_full_buffer=False)
    exit_codes: dict[int, int] = {}
    with wake_r, wake_w:
        while True:
            ready, _, _ = select.select([requests, wake_r], [], [])
            if wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    wake_r.recv(4096)
                _reap(exit_codes)
            if requests not in ready:
                continue
            message, fds, _, _ = socket.recv_fds(requests, 1, MOST_FDS)
            if not message:
                return
            payload, exit_code, *others = fds
            pid = _fork(payload, others, [requests, wake_r, wake_w], [exit_code, *exit_codes.values()])
            if pid > 0:
                exit_codes[pid] = exit_code
            else:
                os.close(exit_code)
            for fd in (payload, *others):
                os.close(fd)
            requests.sendall(_PID.pack(pid))


def _fork(payload: int, fds: list[int], sockets: list[socket.socket], pipes: list[int]) -> int:
    try:
        pid = os.fork()
    except OSError as error:
        return -(error.errno or 1)
    if not pid:
        forked.run_and_exit(partial(_work, payload, fds, sockets, pipes))
    return pid


def _work(payload: int, fds: list[int], sockets: list[socket.socket], pipes: list[int]) -> int:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in sockets:
        end.close()
    for pipe in pipes:
        os.close(pipe)
    _inherited[:] = fds
    return _run(payload)


def _run(payload: int) -> int:
    with os.fdopen(payload, "rb") as file:
        file.seek(0)
        prepared: dict[str, Any] = pickle.load(file)  # noqa: S301  from the process that started this one
        sys.path[:] = prepared["path"]
        os.environ.clear()
        os.environ.update(prepared["environment"])
        with contextlib.suppress(OSError):
            os.chdir(prepared["cwd"])
        process = file.read()
    if prepared["files"]:
        _place(prepared["files"])
    return int(pickle.loads(process)._bootstrap())  # noqa: S301


def _place(numbers: list[int]) -> None:
    for place, fd in enumerate(_inherited):
        _inherited[place] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1)
        os.close(fd)
    for number, fd in zip(numbers, _inherited, strict=False):
        os.dup2(fd, number, inheritable=False)
        os.close(fd)


def _reap(exit_codes: dict[int, int]) -> None:
    while exit_codes:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if (pipe := exit_codes.pop(pid, None)) is not None:
            with contextlib.suppress(OSError):
                os.write(pipe, _PID.pack(os.waitstatus_to_exitcode(status)))
            os.close(pipe)


def main() -> None:
    # Import torch, and serve: the program that `acquire` starts.
    requests = socket.socket(fileno=int(sys.argv[1]))
    import torch.utils.data  # noqa: F401

    serve(requests)
    os._exit(0)
