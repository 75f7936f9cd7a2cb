"""A bound on the memory of what many threads hold at the same time."""

from __future__ import annotations

import threading


class MemoryBudget:
    """So many bytes, and no more. What is larger than all of it may come in when nothing else is there.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, n_bytes: int) -> None:
        """Wait until there is room for so many bytes, and hold it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + n_bytes <= self._size)
            self._taken += n_bytes

    def give(self, n_bytes: int) -> None:
        """Let go of so many bytes."""
        with self._changed:
            self._taken -= n_bytes
            self._changed.notify_all()
