"""What reading cost."""

from __future__ import annotations

import threading
from typing import Any


class Traffic:
    """Counts requests, retries and bytes over all threads of a process. A copy that is unpickled begins at zero."""

    def __init__(self) -> None:
        self.requests = self.retries = self.bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Traffic, ()

    def add(self, requests: int = 0, retries: int = 0, n_bytes: int = 0) -> None:
        """Count some more."""
        with self._lock:
            self.requests += requests
            self.retries += retries
            self.bytes += n_bytes
