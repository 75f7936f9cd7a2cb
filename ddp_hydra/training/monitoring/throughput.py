"""How fast a run trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Throughput:
    """Training speed, with the time of validation left out.

    Args:
        samples: seen so far.
    """

    def __init__(self, samples: int) -> None:
        self.begin = self.mark = time.perf_counter()
        self.first = self.marked = samples

    def lap(self, samples: int) -> tuple[float, float]:
        """Seconds since the last lap, and samples in each."""
        now = time.perf_counter()
        spent = max(now - self.mark, 1e-9)
        speed = (samples - self.marked) / spent
        self.mark, self.marked = now, samples
        return spent, speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the laps and the total."""
        begin = time.perf_counter()
        yield
        spent = time.perf_counter() - begin
        self.begin += spent
        self.mark += spent

    def total(self, samples: int) -> dict[str, float]:
        """Time and mean speed since the beginning."""
        spent = max(time.perf_counter() - self.begin, 1e-9)
        return {"train_s": spent, "samples_per_s": (samples - self.first) / spent}
