"""Ends processes that a rank has left behind, such as a daemon with a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

from ddp_hydra.rank.processes import children, command_of

LEFT_S = 1.0
"""Seconds that such a process may take to end after SIGTERM."""
MAX_NAMED = 10
"""Number of such processes that are named."""


class LeftBehind:
    """Processes that have lost their rank, and have become children of this process.

    Attributes:
        until: process id -> the time at which it is killed.
    """

    def __init__(self) -> None:
        self.until: dict[int, float] = {}

    def end(self, ended: int, ranks: Collection[int]) -> list[str]:
        """Send SIGTERM to those that are there; return the first of them by name.

        Args:
            ended: a process that has just ended; its process group was killed already.
            ranks: children of this process that may stay.
        """
        self.until.pop(ended, None)
        named = []
        for pid in children():
            if pid in ranks or pid in self.until or not (command := command_of(pid)):
                continue
            with contextlib.suppress(OSError):  # it has just ended
                if os.getpgid(pid) != ended:
                    os.kill(pid, signal.SIGTERM)
                    self.until[pid] = time.monotonic() + LEFT_S
                    named.append(f"{command} (process {pid})")
        return named[:MAX_NAMED]

    def kill(self) -> None:
        """Kill those that have not ended in time."""
        for pid, until in self.until.items():
            if time.monotonic() > until:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
