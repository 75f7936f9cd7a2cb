"""Looks after processes of this host: ends them together with the process that started them, says whose they are."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection
from pathlib import Path

LEFT_S = 1.0
"""Seconds that a process which a rank has left behind may take to end after SIGTERM."""
MAX_NAMED = 10
"""Number of processes left behind that are named."""


def kill_group(pid: int) -> None:
    """Kill all processes of a group that still run."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Ask the kernel to make this process the parent of descendants whose own parent ends, whatever their session."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def children() -> list[int]:
    """Return the process ids of this process's children, including zombies."""
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


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
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
    """Return whether the other end of a connection is closed. What it has sent stays to be read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class LeftBehind:
    """Processes that have lost their rank, such as a daemon, and have become children of this process: ends them.

    Attributes:
        until: process id -> the time at which it is killed.
        unnamed: (time, name) of those that were found when a process other than a rank ended; the next rank that ends
            names them.
    """

    def __init__(self) -> None:
        self.until: dict[int, float] = {}
        self.unnamed: list[tuple[float, str]] = []

    def end(self, ended: int, is_rank: bool, ranks: Collection[int]) -> list[str]:
        """Send SIGTERM to those that are there.

        A rank's processes come here a moment before its own end is known, so another process that ends then finds them.

        Args:
            ended: a process that has just ended; its process group was killed already.
            is_rank: whether it was a rank.
            ranks: children of this process that may stay.

        Returns:
            The first of them by name, if a rank has ended.
        """
        now = time.monotonic()
        self.until.pop(ended, None)
        self.unnamed = [(since, name) for since, name in self.unnamed if now - since < LEFT_S]
        for pid in children():
            if pid in ranks or pid in self.until or not (command := command_of(pid)):
                continue
            with contextlib.suppress(OSError):  # it has just ended
                if os.getpgid(pid) != ended:
                    os.kill(pid, signal.SIGTERM)
                    self.until[pid] = now + LEFT_S
                    self.unnamed.append((now, f"{command} (process {pid})"))
        if not is_rank:
            return []
        named, self.unnamed = [name for _, name in self.unnamed[:MAX_NAMED]], []
        return named

    def kill(self) -> None:
        """Kill those that have not ended in time."""
        for pid, until in self.until.items():
            if time.monotonic() > until:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
