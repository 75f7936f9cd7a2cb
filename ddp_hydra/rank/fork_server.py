"""The warm server: imports torch once, then forks a process for each rank.

Run by `warm` only, as `python -m ddp_hydra.rank.fork_server <listening fd> <socket path>`. It is exec'd fresh, so it
has no CUDA context and no threads of Dask, and it never runs a tensor operation, so it has no threads of its own
to lose in a fork.

One connection is one rank. The caller sends a line of JSON with the descriptors that the rank shall have; the
server answers {"pid": …} and, when the rank has ended, {"exit": …, "peak_rss": …}; or {"refused": why} where the host
lets it start no process. A line {"signal": n} passes a signal on to the rank's process group, {"signal": n, "alone":
true} to the rank only. When the caller goes away its rank is killed; when the server goes away the kernel kills all of
them. So no rank outlives its worker, whatever state it is in. A caller that says something else is hung up on.

What a rank leaves behind is ended with it: its process group at once; processes that have left that (a daemon with a
session of its own) fall to the server, which is told of them by the kernel, and are named to the caller: {"exit": …,
"left": […]}.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ddp_hydra.rank.processes import adopt_orphans, children, command_of, die_with_parent, kill_group

PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch._dynamo", "torchvision",
    "numpy", "omegaconf", "hydra.utils", "PIL.Image", "ddp_hydra.rank.process", "ddp_hydra.training.loop",
)  # fmt: skip
"""What nearly every rank imports; what is not installed is left out."""

MAX_REQUEST = 2**24
"""Bytes of a request; most of it is the environment."""
MAX_FDS = 8
REQUEST_S = 30.0
"""How long a caller may take from the first byte of a line to its last."""
LEFT_S = 1.0
"""How long a process that a rank has left behind may take to end after SIGTERM."""
MAX_NAMED = 10
LINGER_S = 30.0
"""How long a server waits for its first connection."""


@dataclass
class Caller:
    """One connection, and its rank once it asked for one.

    Attributes:
        heard: the beginning of a line that has not ended.
        since: when that began.
        fds: descriptors for the rank.
        has_asked: it has asked for its rank.
    """

    connection: socket.socket
    pid: int | None = None
    heard: bytes = b""
    since: float = 0.0
    fds: list[int] = field(default_factory=list)
    has_asked: bool = False


class Server:
    """Forks ranks on request until nobody is connected any more."""

    def __init__(self, listener: socket.socket, address: Path) -> None:
        self.listener = listener
        self.address = address
        self.selector = selectors.DefaultSelector()
        self.callers: dict[int, Caller] = {}
        self.ranks: set[int] = set()
        self.left: dict[int, float] = {}
        """Processes that ranks have left behind, and when they are killed."""
        self.wake_r, self.wake_w = socket.socketpair()

    def serve(self) -> None:
        """Serve until the last connection is gone."""
        for end in (self.listener, self.wake_r, self.wake_w):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a host that is shut down: the ranks finish first
        signal.set_wakeup_fd(self.wake_w.fileno())
        adopt_orphans()
        self.ranks = set(children())  # of what is preloaded, if any
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.wake_r, selectors.EVENT_READ)
        timeout_s: float | None = LINGER_S
        while True:
            events = self.selector.select(timeout_s)
            for key, _ in events:
                if key.fileobj is self.listener:
                    self.accept()
                elif key.fileobj is self.wake_r:
                    self.wake_r.recv(4096)
                elif key.fd in self.callers:
                    self.hear(self.callers[key.fd])
            self.reap()
            self.drop_slow()
            self.kill_left()
            timeout_s = REQUEST_S if any(caller.heard for caller in self.callers.values()) else None
            timeout_s = LEFT_S if self.left else timeout_s
            if not self.callers and not self.left and self.leave():
                return

    def accept(self) -> None:
        """Take in the next caller, if it is this user."""
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor left: the caller stays in the queue
            time.sleep(0.05)
            return
        connection.setblocking(False)
        self.callers[connection.fileno()] = Caller(connection)
        self.selector.register(connection, selectors.EVENT_READ)

    def hear(self, caller: Caller) -> None:
        """Act on what a caller says; the end of its connection is the end of its rank."""
        try:
            data, fds, _, _ = socket.recv_fds(caller.connection, 2**18, MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        caller.fds += fds
        caller.since = caller.since if caller.heard else time.monotonic()
        *lines, caller.heard = (caller.heard + data).split(b"\n")
        try:
            if not data or len(caller.heard) > MAX_REQUEST or len(caller.fds) > MAX_FDS:
                raise ValueError
            for line in lines:
                self.obey(caller, json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError):
            self.drop(caller)

    def obey(self, caller: Caller, request: Any) -> None:
        """Act on one request."""
        if not isinstance(request, dict):
            raise TypeError("a request is an object")
        if "signal" in request:
            self.kill(caller, request["signal"], bool(request.get("alone")))
        elif caller.has_asked:
            raise ValueError("one connection is one rank")
        else:
            self.spawn(caller, request)

    def drop_slow(self) -> None:
        """Hang up on callers that do not come to the end of a line."""
        for caller in list(self.callers.values()):
            if caller.heard and time.monotonic() - caller.since > REQUEST_S:
                self.drop(caller)

    def spawn(self, caller: Caller, request: dict[str, Any]) -> None:
        """Fork one rank."""
        caller.has_asked = True
        try:
            pid = os.fork()
        except OSError as error:  # no room for another process: those that run go on
            self.tell(caller, {"refused": str(error)})
        else:
            if pid == 0:
                self.become_rank(request, caller.fds)
            caller.pid = pid
            self.ranks.add(pid)
            self.tell(caller, {"pid": pid})
        close_all(caller.fds)

    def become_rank(self, request: dict[str, Any], fds: list[int]) -> NoReturn:
        """Turn this fork into a rank: own session, output, cores and environment; then run it."""
        code = 1
        try:
            server_pid = os.getppid()
            os.setsid()
            die_with_parent(server_pid)
            adopt_orphans()  # what is left behind is known by its rank's end
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            self.selector.close()
            for end in (
                self.listener,
                self.wake_r,
                self.wake_w,
                *(c.connection for c in self.callers.values()),
            ):
                end.close()
            control, output, shared_status, order, *listener = fds
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            if request["affinity"]:
                with contextlib.suppress(OSError):  # the administrator has taken those cores away meanwhile
                    os.sched_setaffinity(0, request["affinity"])
            os.environ.clear()
            os.environ.update(request["environment"])
            os.chdir(request["cwd"])
            sys.path[:] = request["path"]
            from ddp_hydra.rank import process

            its_listener = listener[0] if listener else None
            code = process.main(request["title"], order, control, shared_status, its_listener)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def reap(self) -> None:
        """Tell the callers of ended ranks how they ended."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.ranks:
                self.ranks.discard(pid)
                kill_group(pid)  # what the rank itself had started, such as data loader processes
            self.left.pop(pid, None)
            left = self.end_left(pid)
            for caller in self.callers.values():
                if caller.pid == pid:
                    caller.pid = None
                    exit_code = os.waitstatus_to_exitcode(status)
                    self.tell(caller, {"exit": exit_code, "peak_rss": usage.ru_maxrss * 1024, "left": left})

    def end_left(self, group: int) -> list[str]:
        """Ask processes that have come to this one since to end; returns the first of them by name.

        Args:
            group: a process group that is killed already.
        """
        named = []
        for pid in children():
            if pid in self.ranks or pid in self.left or not (command := command_of(pid)):
                continue
            with contextlib.suppress(OSError):  # it has just ended
                if os.getpgid(pid) != group:
                    os.kill(pid, signal.SIGTERM)
                    self.left[pid] = time.monotonic() + LEFT_S
                    named.append(f"{command} (process {pid})")
        return named[:MAX_NAMED]

    def kill_left(self) -> None:
        """Kill those that have not ended in time."""
        for pid, until in self.left.items():
            if time.monotonic() > until:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def kill(self, caller: Caller, number: int, alone: bool = False) -> None:
        """Send a signal to a caller's rank, and to what it started."""
        if caller.pid is not None:
            with contextlib.suppress(OSError):  # it has just ended, or there is no such signal
                (os.kill if alone else os.killpg)(caller.pid, number)

    def drop(self, caller: Caller) -> None:
        """Forget a caller that is gone, and kill its rank."""
        self.kill(caller, signal.SIGKILL)
        self.callers.pop(caller.connection.fileno())
        self.selector.unregister(caller.connection)
        caller.connection.close()
        close_all(caller.fds)

    def tell(self, caller: Caller, message: dict[str, Any]) -> None:
        """Answer; a caller that is gone is dropped at its next event."""
        with contextlib.suppress(OSError):
            caller.connection.sendall(json.dumps(message).encode() + b"\n")

    def leave(self) -> bool:
        """Remove the socket and say True, unless somebody is just coming."""
        try:
            folder = os.open(self.address.parent, os.O_RDONLY)
        except OSError:  # logind removes it with the last session of its user: nobody finds us any more
            self.accept()
            return not self.callers
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.accept()
            if self.callers:
                return False
            self.listener.close()
            self.address.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others may have their sockets in it
                self.address.parent.rmdir()
            return True
        finally:
            os.close(folder)


def close_all(fds: list[int]) -> None:
    """Close descriptors, and forget them."""
    while fds:
        os.close(fds.pop())


def preload() -> None:
    """Import what ranks need, so that a fork has it at once."""
    for name in PRELOAD:
        with contextlib.suppress(Exception):  # the rank that needs it will say what is wrong with it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # keeps the garbage collector of a fork from touching, and so copying, the shared pages


def main(listener_fd: int, address: str) -> None:
    """Become the warm server."""
    from setproctitle import setproctitle

    setproctitle("ddp_hydra warm server")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    server = Server(socket.socket(fileno=listener_fd), Path(address))
    preload()
    server.serve()
    os._exit(0)  # the destructors of the preloaded libraries have nothing to do


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
