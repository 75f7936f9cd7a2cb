"""Counts the samples that can't be read, remembers their names, and raises when they are too many."""

from __future__ import annotations

import threading
from typing import Any

MOST_IN_A_ROW = 100
"""Number of bad samples in a row after which reading fails: the fault is not in single files."""


class LostSamples(ValueError):
    """All samples of a shard can't be read.

    Args:
        message: why.
        name: of the shard.
        first: index of the first of its samples.
        count: how many samples it has.
    """

    def __init__(self, message: str, name: str, first: int, count: int) -> None:
        super().__init__(message)
        self.name, self.first, self.count = name, first, count


class TooManyBadSamplesError(ValueError):
    """More samples are bad than the user allows."""

    mistake = True


class BadSamples:
    """The samples that were found bad in this process.

    Args:
        n_samples: length of the data set.
        max_fraction: share of the samples that may be bad, 0..1.
        where: name of the data set, for messages.
        missing: the advice where a file is missing, before the others.

    Attributes:
        reasons: {name: what is wrong}.
        counts: {name of a shard: how many samples it has}.
        count: how many samples are bad.
    """

    def __init__(self, n_samples: int, max_fraction: float, where: str, missing: str = "") -> None:
        self.n_samples = n_samples
        self.max_fraction = max_fraction
        self.where = where
        self.missing = missing
        self.reasons: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.count = 0
        self._ends: dict[int, int] = {}  # of each bad sample: the index of the next one
        self._lost: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def next_after(self, index: int) -> int | None:
        # Return the index that follows a bad sample or its lost shard; None if the sample is not known to be bad.
        for first, end in self._lost:
            if first <= index < end:
                return end % self.n_samples
        return self._ends.get(index)

    def add(self, index: int, name: str, error: Exception) -> None:
        with self._lock:
            if self.next_after(index) is not None:
                return  # another thread has noted it
            if isinstance(error, LostSamples):
                # In this order, as they are read without the lock: who finds a sample bad finds why, and how many are.
                self.counts[error.name] = error.count
                self.reasons[error.name] = str(error)
                self._lost.append((error.first, error.first + error.count))
                self.count += error.count
            else:
                self.reasons[name] = str(error)
                self._ends[index] = (index + 1) % self.n_samples
                self.count += 1
        allowed = self.max_fraction * self.n_samples
        if self.count > allowed:
            are = "is" if self.count == 1 else "are"
            advice = self.missing if isinstance(error, FileNotFoundError) else ""
            raise TooManyBadSamplesError(
                f"{self.count} of {self.n_samples} samples of {self.where} {are} bad, and data.max_bad_fraction="
                f"{self.max_fraction:g} allows {int(allowed)}: {self.examples()}. {advice}"
                "Remove them, or type a larger data.max_bad_fraction=..."
            ) from None

    def examples(self) -> str:
        with self._lock:
            bad = sorted(self.reasons.items())
        return "; ".join(f"{name} ({reason})" for name, reason in bad[:3]) + ("; ..." if len(bad) > 3 else "")
