"""What the fork server has of each rank: its caller's connection, and a fork that is ready before it is asked for.

A rank need not wait for its fork then: 12 ms each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ddp_hydra import forked
from ddp_hydra.rank.processes import RANK_PID

MOST = 8
"""How many are kept at the most: each takes some megabytes."""
SEND_S = 1.0
"""Seconds that a fork may take to read its request."""
MAX_FDS = 8


class SpareForks:
    """Forks that wait for the request of a rank.

    Args:
        leave_server: called in a fork first: closes what is the server's.
        become_rank: called in a fork with the request of a rank and its descriptors.

    Attributes:
        connections: process id -> the socket on which the fork waits.
    """

    def __init__(
        self, leave_server: Callable[[], None], become_rank: Callable[[dict[str, Any], list[int]], NoReturn]
    ) -> None:
        self.leave_server, self.become_rank = leave_server, become_rank
        self.connections: dict[int, socket.socket] = {}
        self.wanted = 0

    @property
    def are_missing(self) -> bool:
        return len(self.connections) < min(self.wanted, MOST)

    def add(self) -> None:
        """Fork one more; none where the host allows no other process."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                self.wanted = 0
                return
            if pid == 0:
                self._wait(ours, theirs)
        ours.settimeout(SEND_S)
        self.connections[pid] = ours

    def _wait(self, servers_end: socket.socket, connection: socket.socket) -> NoReturn:
        """Wait for a request, and become its rank; end with the server. Runs in the fork."""
        try:
            from setproctitle import setproctitle

            setproctitle("ddp_hydra spare fork")
            servers_end.close()
            self.leave_server()
            request, fds = b"", []
            while not request.endswith(b"\n"):
                data, more, _, _ = socket.recv_fds(connection, 2**18, MAX_FDS)
                if not data:
                    os._exit(0)
                request += data
                fds += more
            connection.close()
        except BaseException:
            os._exit(1)
        self.become_rank(json.loads(request), fds)

    def take(self, request: dict[str, Any], fds: list[int]) -> int | None:
        """Hand a request to a fork; return the process id of the rank, None if there is no fork."""
        line = json.dumps(request).encode() + b"\n"
        while self.connections:
            pid, connection = self.connections.popitem()
            with connection:
                try:
                    sent = socket.send_fds(connection, [line], fds)
                    if rest := line[sent:]:  # a fork that has all of it has closed its end
                        connection.sendall(rest)
                except OSError:  # it was killed, or is suspended
                    _end(pid)
                else:
                    return pid
        return None

    def forget(self, pid: int) -> bool:
        connection = self.connections.pop(pid, None)
        if connection is not None:
            connection.close()
        return connection is not None

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    def end(self) -> None:
        pids = list(self.connections)
        self.close()
        for pid in pids:
            _end(pid)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# -- from a fork to a rank -------------------------------------------------------------------------------


def become_rank(request: dict[str, Any], fds: list[int]) -> NoReturn:
    def run() -> int:
        forked.begin()
        for fd in fds:
            os.set_inheritable(fd, False)
        control, output, shared_status = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        if request["affinity"]:
            with contextlib.suppress(OSError):  # an administrator has taken those cores away
                os.sched_setaffinity(0, request["affinity"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.environ[RANK_PID] = str(os.getpid())  # by which the server knows what the rank leaves behind
        tempfile.tempdir = None  # the server's folder for temporary files may be another command's
        os.chdir(request["cwd"])
        sys.path[:] = request["path"]
        from ddp_hydra.rank import process

        code = process.main(request["title"], control, shared_status)
        forked.end()
        return code

    forked.run_and_exit(run)


@dataclass
class Caller:
    """A connection, and its rank if it has requested one.

    Attributes:
        pid: of the rank; None before it starts and after it has ended.
        partial_line: the beginning of a line whose end has not come yet.
        only_asks: it has asked for the status, or for the end.
        was_ended: the rank got a signal that ends a process while it ran.
    """

    connection: socket.socket
    pid: int | None = None
    partial_line: bytes = b""
    fds: list[int] = field(default_factory=list)
    has_requested: bool = False
    only_asks: bool = False
    was_ended: bool = False

    def requests(self) -> list[Any]:
        """Return the requests that have arrived; ValueError if the connection has ended, or what came is none."""
        try:
            data, fds, _, _ = socket.recv_fds(self.connection, 2**18, MAX_FDS)
        except BlockingIOError:
            return []
        except OSError:
            data, fds = b"", []
        self.fds += fds
        *lines, self.partial_line = (self.partial_line + data).split(b"\n")
        if not data or len(self.fds) > MAX_FDS:
            raise ValueError("the connection has ended, or it sends too many descriptors")
        return [json.loads(line) for line in lines]

    def reply(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def kill(self, number: int, alone: bool = False) -> None:
        """Send a signal to the rank, and to its process group unless `alone`."""
        if self.pid is not None:
            with contextlib.suppress(OSError):  # it has just ended, or there is no such signal
                try:
                    (os.kill if alone else os.killpg)(self.pid, number)
                except ProcessLookupError:  # a fork that has no group of its own yet
                    os.kill(self.pid, number)
                self.was_ended |= number in (signal.SIGTERM, signal.SIGKILL)

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def close(self) -> None:
        self.kill(signal.SIGKILL)
        self.connection.close()
        self.close_fds()
