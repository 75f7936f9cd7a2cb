"""A bound on the memory that many threads use at the same time."""

from __future__ import annotations

import threading


class MemoryBudget:
    """Lets threads use a number of bytes together. A single request that is larger than all of it may be used alone.

    Args:
        size: the number of bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, n_bytes: int) -> None:
        """Wait until `n_bytes` are free, and take them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + n_bytes <= self._size)
            self._taken += n_bytes

    def give(self, n_bytes: int) -> None:
        """Give `n_bytes` back."""
        with self._changed:
            self._taken -= n_bytes
            self._changed.notify_all()
