"""Looks after processes of this host: ends them together with the process that started them, says whose they are."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection
from pathlib import Path

LEFT_S = 1.0
"""Seconds that a process which a rank has left behind may take to end after SIGTERM."""
RANK_PID = "DDP_HYDRA_RANK_PID"
"""Environment variable of a rank, and of the programs that it starts: its process id."""
MAX_NAMED = 10
"""Number of processes left behind that are named."""


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def children() -> list[int]:
    found: list[int] = []
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            found += map(int, thread.read_text().split())
    return found


def command_of(pid: int) -> str:
    """Return the beginning of a process's command line; "" if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:80]


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
        if os.getppid() != parent:
            os._exit(1)


def user_of(connection: socket.socket) -> int | None:
    """Return the user id of the process at the other end of a Unix socket; None where the kernel does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    format_ = "3i"  # process, user and group id
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(format_))
    return int(struct.unpack(format_, credentials)[1])


def has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def rank_of(pid: int) -> int | None:
    """Return the process id of the rank that a process belongs to; None if that is not known."""
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes()  # of the program that it runs
        if found := re.search(rf"(?:^|\0){RANK_PID}=(\d+)\0".encode(), variables):
            return int(found[1])
        return os.getsid(pid)
    return None


class LeftBehind:
    """Processes whose parent has ended, such as a daemon, and that have become children of this process.

    They may run as long as their rank, and are ended with it.

    Attributes:
        until: process id -> the time at which it is killed.
    """

    def __init__(self) -> None:
        self.until: dict[int, float] = {}

    def end(self, ended: int, ranks: Collection[int], spares: Collection[int] = ()) -> list[str]:
        """Send SIGTERM to processes of a rank that has ended, and to processes of no rank where no other rank runs.

        Args:
            ended: the rank; its process group was killed already.
            spares: other children of this process that may stay.
        """
        named: list[str] = []
        for pid in children():
            if pid in ranks or pid in spares or pid in self.until or not (command := command_of(pid)):
                continue
            owner = rank_of(pid)
            if owner != ended and ranks:
                continue
            with contextlib.suppress(OSError):  # it has just ended
                if os.getpgid(pid) != ended:
                    os.kill(pid, signal.SIGTERM)
                    self.until[pid] = time.monotonic() + LEFT_S
                    named.append(f"{command} (process {pid})")
        return named[:MAX_NAMED]

    def kill(self) -> None:
        for pid, until in self.until.items():
            if time.monotonic() > until:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
