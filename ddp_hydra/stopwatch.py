"""How fast a run trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_hydra.loader import Loader


class Stopwatch:
    """Training speed, with the time of validation left out.

    Args:
        samples: seen so far.
    """

    def __init__(self, samples: int) -> None:
        self.begin = self.mark = time.perf_counter()
        self.first = self.marked = samples

    def lap(self, samples: int, loader: Loader) -> dict[str, float]:
        """Speed and share of the time spent waiting for data since the last lap."""
        now = time.perf_counter()
        spent = max(now - self.mark, 1e-9)
        lap = {"samples_per_s": (samples - self.marked) / spent, "data_wait": loader.waited_s / spent}
        self.mark, self.marked, loader.waited_s = now, samples, 0.0
        return lap

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
