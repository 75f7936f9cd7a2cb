"""What becomes of samples that can't be read: counted, named, and not too many."""

from __future__ import annotations

import threading
from typing import Any

MOST_IN_A_ROW = 100
"""After so many bad ones side by side, it is not single samples that are bad."""


class LostSamples(ValueError):
    """Several neighbouring samples can't be read, for one reason: that of their shard.

    Args:
        message: the reason.
        name: what they have in common.
        first: index of the first.
        count: how many they are.
    """

    def __init__(self, message: str, name: str, first: int, count: int) -> None:
        super().__init__(message)
        self.name, self.first, self.count = name, first, count


class TooManyBadSamplesError(ValueError):
    """More samples are bad than may be."""

    mistake = True


class BadSamples:
    """The samples that were found bad in this process.

    Args:
        n_samples: length of the data set.
        max_fraction: share of it that may be bad, 0..1.
        where: the data set, for messages.

    Attributes:
        reasons: {name: what is wrong}.
        counts: {name: how many samples it stands for}, where that is not one.
        count: how many they are.
    """

    def __init__(self, n_samples: int, max_fraction: float, where: str) -> None:
        self.n_samples = n_samples
        self.max_fraction = max_fraction
        self.where = where
        self.reasons: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.count = 0
        self._ends: dict[int, int] = {}  # of each bad sample or shard: where the next one begins
        self._lost: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def behind(self, index: int) -> int | None:
        """Return the index behind a bad sample, or behind its lost shard; None of one that is not known as bad."""
        for first, end in self._lost:
            if first <= index < end:
                return end % self.n_samples
        return self._ends.get(index)

    def add(self, index: int, name: str, error: Exception) -> None:
        """Note a bad sample, or a lost shard.

        Raises:
            TooManyBadSamplesError: there are too many now.
        """
        with self._lock:
            if self.behind(index) is not None:
                return  # another thread was first
            if isinstance(error, LostSamples):
                self._lost.append((error.first, error.first + error.count))
                self.reasons[error.name] = str(error)
                self.counts[error.name] = error.count
                self.count += error.count
            else:
                self._ends[index] = (index + 1) % self.n_samples
                self.reasons[name] = str(error)
                self.count += 1
        allowed = self.max_fraction * self.n_samples
        if self.count > allowed:
            raise TooManyBadSamplesError(
                f"{self.count} of {self.n_samples} samples of {self.where} are bad, and data.max_bad_fraction="
                f"{self.max_fraction:g} allows {int(allowed)}: {self.some()}. Remove them, or type a larger "
                "data.max_bad_fraction=..."
            ) from None

    def some(self) -> str:
        """Name the first few."""
        with self._lock:
            bad = sorted(self.reasons.items())
        return "; ".join(f"{name} ({reason})" for name, reason in bad[:3]) + ("; ..." if len(bad) > 3 else "")
