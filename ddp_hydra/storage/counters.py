"""Counts the requests and bytes of stores."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any


class Counters:
    """Counters by name, for all threads of a process. Each thread has its own sums, so that no thread waits for a lock.

    An unpickled copy begins at zero.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._all: list[defaultdict[str, float]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def add(self, **more: float) -> None:
        """Add to some counters, given by name."""
        counts = self.of_thread()
        for name, value in more.items():
            counts[name] += value

    def of_thread(self) -> defaultdict[str, float]:
        """Return the counts of the calling thread."""
        try:
            return self._local.counts
        except AttributeError:
            counts: defaultdict[str, float] = defaultdict(float)
            self._local.counts = counts
            self._all.append(counts)
            return counts

    def total(self, name: str) -> float:
        """Return the sum over all threads."""
        return sum(counts.get(name, 0) for counts in list(self._all))


class TransferCounters(Counters):
    """Counts answered requests, retries, and bytes."""

    def read(self, n_bytes: int) -> None:
        """Count an answer of so many bytes."""
        counts = self.of_thread()
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
