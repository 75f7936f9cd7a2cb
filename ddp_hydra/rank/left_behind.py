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
        unnamed: (time, name) of those that were found as another process ended than a rank; the next rank names them.
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
