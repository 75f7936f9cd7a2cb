"""What reading cost."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any


class TransferCounters:
    """Counts over all threads of a process, each of which adds up its own: nobody waits for a lock.

    A copy that is unpickled begins at zero.
    """

    def __init__(self) -> None:
        self._mine = threading.local()
        self._all: list[defaultdict[str, float]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def add(self, **more: float) -> None:
        """Count some more, by name."""
        counts = self.mine()
        for name, value in more.items():
            counts[name] += value

    def mine(self) -> defaultdict[str, float]:
        """Return the counts of the calling thread."""
        try:
            return self._mine.counts
        except AttributeError:
            counts: defaultdict[str, float] = defaultdict(float)
            self._mine.counts = counts
            self._all.append(counts)
            return counts

    def total(self, name: str) -> float:
        """Return what was counted so far."""
        return sum(counts.get(name, 0) for counts in list(self._all))


class Traffic(TransferCounters):
    """Counts requests that were answered, retries, and bytes."""

    def read(self, n_bytes: int) -> None:
        """Count an answer."""
        counts = self.mine()
        counts["requests"] += 1
        counts["bytes"] += n_bytes

    @property
    def requests(self) -> int:
        """Requests that were answered."""
        return int(self.total("requests"))

    @property
    def retries(self) -> int:
        """Requests that were made again."""
        return int(self.total("retries"))

    @property
    def bytes(self) -> int:
        """Bytes that were read."""
        return int(self.total("bytes"))
