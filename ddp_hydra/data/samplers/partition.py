"""Every sample exactly once, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """Every sample exactly once over all ranks, in order: rank r takes r, r + n, r + 2n …

    The ranks' counts differ by at most one, so nothing in the loop may be a collective.

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
        """This rank's batches; the last may be short."""
        mine = range(self.rank, self.n_samples, self.world_size)
        for start in range(0, len(mine), self.batch_size):
            yield list(mine[start : start + self.batch_size])
