"""One connection to the fork server: reads its requests, answers them, and signals its rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from ddp_hydra.rank.spare_forks import MAX_FDS

MAX_REQUEST = 2**24
"""Allowed bytes of a request; most of it is the environment."""
REQUEST_S = 30.0
"""Seconds that a caller may take from the first byte of a line to the last."""


@dataclass
class Caller:
    """A connection, and its rank if it has requested one.

    Attributes:
        pid: of the rank; None before it starts and after it has ended.
        partial_line: the beginning of a line whose end has not come yet.
        since: when that began.
        fds: descriptors for the rank.
        has_requested: it has requested its rank.
        only_asks: it has asked for the status, or for the end.
    """

    connection: socket.socket
    pid: int | None = None
    partial_line: bytes = b""
    since: float = 0.0
    fds: list[int] = field(default_factory=list)
    has_requested: bool = False
    only_asks: bool = False

    @property
    def is_slow(self) -> bool:
        return bool(self.partial_line) and time.monotonic() - self.since > REQUEST_S

    def requests(self) -> list[Any]:
        """Return the requests that have arrived.

        Raises:
            ValueError: the connection has ended, or what came is not a request.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self.connection, 2**18, MAX_FDS)
        except BlockingIOError:
            return []
        except OSError:
            data, fds = b"", []
        self.fds += fds
        self.since = self.since if self.partial_line else time.monotonic()
        *lines, self.partial_line = (self.partial_line + data).split(b"\n")
        if not data or len(self.partial_line) > MAX_REQUEST or len(self.fds) > MAX_FDS:
            raise ValueError("the connection has ended, or a request is too long")
        return [json.loads(line) for line in lines]

    def reply(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def kill(self, number: int, alone: bool = False) -> None:
        """Send a signal to the rank, and to its process group unless `alone`."""
        if self.pid is not None:
            with contextlib.suppress(OSError):  # it has just ended, or there is no such signal
                (os.kill if alone else os.killpg)(self.pid, number)

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def close(self) -> None:
        self.kill(signal.SIGKILL)
        self.connection.close()
        self.close_fds()
