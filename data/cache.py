"""A bounded cache in the memory of one process."""

from __future__ import annotations

import threading
from typing import Any


class Cache:
    """Keeps values up to a budget; what came first stays.

    Nothing is evicted: an epoch reads every sample once in a new order, and then a cache that drops its
    oldest entries to make room hits almost never, while this one hits as often as its share of the data.

    Args:
        budget: bytes.
    """

    def __init__(self, budget: int) -> None:
        self._left = budget
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> Any:
        """Return the value of `key`, or None."""
        return self._values.get(key)

    def put(self, key: str, value: Any, size: int) -> None:
        """Keep `value` of `size` bytes, if it still fits."""
        with self._lock:
            if size <= self._left and key not in self._values:
                self._values[key] = value
                self._left -= size
