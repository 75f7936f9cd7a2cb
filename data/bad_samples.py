"""What becomes of samples that can't be read: counted, named, and not too many."""

from __future__ import annotations

import threading
from typing import Any

MOST_IN_A_ROW = 100
"""After so many bad ones side by side, it is not single samples that are bad."""


class BadSamples:
    """The samples that were found bad in this process.

    Args:
        n_samples: length of the data set.
        max_fraction: share of it that may be bad, 0..1.
        where: the data set, for messages.

    Attributes:
        reasons: {name: what is wrong}.
    """

    def __init__(self, n_samples: int, max_fraction: float, where: str) -> None:
        self.n_samples = n_samples
        self.max_fraction = max_fraction
        self.where = where
        self.reasons: dict[str, str] = {}
        self._indices: set[int] = set()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def __contains__(self, index: int) -> bool:
        return index in self._indices

    def add(self, index: int, name: str, error: Exception) -> None:
        """Note a bad sample.

        Raises:
            ValueError: there are too many now.
        """
        with self._lock:
            self._indices.add(index)
            self.reasons[name] = str(error)
            n_bad = len(self.reasons)
        allowed = self.max_fraction * self.n_samples
        if n_bad > allowed:
            raise ValueError(
                f"{n_bad} of {self.n_samples} images of {self.where} are bad, and data.max_bad_fraction="
                f"{self.max_fraction:g} allows {int(allowed)}: {self.some()}. Remove them, or type a larger "
                "data.max_bad_fraction=..."
            ) from None

    def some(self) -> str:
        """Name the first few."""
        with self._lock:
            bad = sorted(self.reasons.items())
        return "; ".join(f"{name} ({reason})" for name, reason in bad[:3]) + ("; ..." if len(bad) > 3 else "")
