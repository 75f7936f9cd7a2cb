"""Repeats the same few batches: a correct model can memorise them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, cycle, islice
from typing import Any

from ddp_hydra.data.draws import Indices


class Repeated:
    """Repeats the first batches of the first epoch of another sampler; its epochs are as long as the other's.

    Args:
        sampler: the other sampler.
        batches: how many batches are repeated.
    """

    def __init__(self, sampler: Any, batches: int) -> None:
        self.sampler, self.first = sampler, batches
        self.global_batch = sampler.global_batch

    def __len__(self) -> int:
        return len(self.sampler)

    def steps(self, position: int = 0) -> int:
        """Return how many steps are left in an epoch, see `Sampler.steps`."""
        return int(self.sampler.steps(position))

    def batches(self, epoch: int, position: int = 0) -> Iterator[list[int]]:
        """Yield this rank's batches of an epoch, from `position` on."""
        first = list(islice(self.sampler.batches(0), self.first))
        begin = (len(self) - self.steps(position)) % len(first)
        again = islice(cycle(enumerate(first)), begin, begin + self.steps(position))
        for start, (number, batch) in zip(count(position, self.global_batch), again, strict=False):
            if isinstance(batch, Indices):  # what a data set draws is as new as in another epoch
                ahead = start - number * self.global_batch
                batch = Indices(batch, epoch, [place + ahead for place in batch.positions])
            yield batch
