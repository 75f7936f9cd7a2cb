"""Looks after processes of this host: ends them together with the process that started them, says whose they are."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
from pathlib import Path


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
