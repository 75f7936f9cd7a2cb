"""Measures the speed of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Throughput:
    """Measures training speed, without the time of validation.

    Args:
        samples: samples that all ranks had seen before this run began.
    """

    def __init__(self, samples: int) -> None:
        self.run_began = self.interval_began = time.perf_counter()
        self.samples_at_start = self.samples_at_interval = samples

    def interval(self, samples: int) -> tuple[float, float]:
        """End an interval; return its seconds and its samples per second.

        Args:
            samples: samples that all ranks have seen so far.
        """
        now = time.perf_counter()
        seconds = max(now - self.interval_began, 1e-9)
        speed = (samples - self.samples_at_interval) / seconds
        self.interval_began, self.samples_at_interval = now, samples
        return seconds, speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the interval and the totals."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.run_began += seconds
        self.interval_began += seconds

    def totals(self, samples: int) -> dict[str, float]:
        """Return the time and the mean speed since the run began.

        Args:
            samples: samples that all ranks have seen so far.
        """
        seconds = max(time.perf_counter() - self.run_began, 1e-9)
        return {"train_s": seconds, "samples_per_s": (samples - self.samples_at_start) / seconds}
