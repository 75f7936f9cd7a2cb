"""A bounded cache in the memory of one process."""

from __future__ import annotations

import threading
from typing import Any


class Cache:
    """Keeps values until its budget is used up, and never evicts any.

    Every epoch reads each sample once, in a new order. A cache that drops its oldest values would almost never hit;
    this one hits as often as its share of the data.

    Args:
        budget: bytes.
    """

    def __init__(self, budget: int) -> None:
        self._left = budget
        self._values: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: Any) -> Any:
        """Return the value of `key`, or None if there is none."""
        return self._values.get(key)

    def put(self, key: Any, value: Any, size: int) -> None:
        """Keep a value of `size` bytes, if it still fits."""
        with self._lock:
            if size <= self._left and key not in self._values:
                self._values[key] = value
                self._left -= size
