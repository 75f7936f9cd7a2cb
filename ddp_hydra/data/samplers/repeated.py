"""The same few batches again and again: what a model that is right learns by heart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any


class Repeated:
    """A sampler that gives only the first batches of another one's first epoch, in epochs as long.

    Args:
        sampler: the other.
        batches: how many.
    """

    def __init__(self, sampler: Any, batches: int) -> None:
        self.sampler, self.first = sampler, batches
        self.global_batch = sampler.global_batch

    def __len__(self) -> int:
        return len(self.sampler)

    def steps(self, position: int = 0) -> int:
        """Return how many steps an epoch still has."""
        return int(self.sampler.steps(position))

    def batches(self, epoch: int, position: int = 0) -> Iterator[list[int]]:
        """Yield this rank's batches of an epoch."""
        first = list(islice(self.sampler.batches(0), self.first))
        begin = (len(self) - self.steps(position)) % len(first)
        return islice(cycle(first), begin, begin + self.steps(position))
