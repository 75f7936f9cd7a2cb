"""Reads every sample exactly once, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """Gives every sample to exactly one rank, in order: rank r of n takes the samples r, r + n, r + 2n, ...

    The ranks may have different numbers of batches, so the loop over the batches must not contain a collective.

    Args:
        n_samples: length of the data set.
        batch_size: samples per rank and step.
        rank: this rank.
        world_size: number of ranks.
    """

    n_samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1

    def batches(self) -> Iterator[list[int]]:
        """Yield this rank's batches; the last one may be smaller."""
        indices = range(self.rank, self.n_samples, self.world_size)
        for start in range(0, len(indices), self.batch_size):
            yield list(indices[start : start + self.batch_size])
