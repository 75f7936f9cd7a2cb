"""Samplers that keep to neighbouring samples, so that few shards are read at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler


class _RangeSampler(Sampler):
    """Yields the samples of one range after the other.

    Attributes:
        ranges: list of (first, end).
        epoch: number of the next pass; it grows by itself, or is set by `set_epoch`.
    """

    def __init__(self, ranges: list[tuple[int, int]], seed: int, shuffle: bool, shufflefirst: bool) -> None:
        self.ranges = ranges
        self.seed = seed
        self.shuffle = shuffle
        self.shufflefirst = shufflefirst
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def __iter__(self) -> Iterator[int]:
        """Yield indices. The first pass keeps the order of the ranges, unless `shufflefirst` is set."""
        chance = random.Random(f"{self.seed}/{self.epoch}")  # noqa: S311
        ranges = list(self.ranges)
        if self.shuffle and (self.shufflefirst or self.epoch > 0):
            chance.shuffle(ranges)
        self.epoch += 1
        for first, end in ranges:
            inside = list(range(first, end))
            if self.shuffle:
                chance.shuffle(inside)
            yield from inside


class ChunkedSampler(_RangeSampler):
    """Cuts a data set into chunks, and shuffles the chunks, and the samples in each.

    Args:
        dataset: has a length.
        num_samples: number of samples, from the first; or (first, end); None: all.
        chunksize: samples in a chunk.
        seed: of the order, together with the epoch.
        shuffle: whether to shuffle.
        shufflefirst: whether to shuffle the chunks of the first pass, too.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_samples: int | tuple[int, int] | None = None,
        chunksize: int = 2000,
        seed: int = 0,
        shuffle: bool = False,
        shufflefirst: bool = False,
    ) -> None:
        first, end = (0, num_samples or len(dataset)) if not isinstance(num_samples, tuple) else num_samples
        if not 0 <= first < end <= len(dataset) or chunksize < 1:
            raise ValueError(
                f"num_samples={num_samples} and chunksize={chunksize}: the data set has {len(dataset):,} samples, of "
                "which some have to be chosen, and a chunk has at least one"
            )
        ranges = [(start, min(start + chunksize, end)) for start in range(first, end, chunksize)]
        super().__init__(ranges, seed, shuffle, shufflefirst)


def DistributedChunkedSampler(  # noqa: N802 (its name in wids)
    dataset: Any,
    *,
    num_replicas: int | None = None,
    num_samples: int | None = None,
    rank: int | None = None,
    shuffle: bool = True,
    shufflefirst: bool = False,
    seed: int = 0,
    drop_last: bool | None = None,
    chunksize: int = 1_000_000,
) -> ChunkedSampler:
    """Return a `ChunkedSampler` for this rank's part of the samples; all parts have the same length.

    Args:
        dataset: has a length.
        num_replicas: number of ranks; None: of the process group, or 1 without one.
        num_samples: number of samples that are divided among the ranks; None: all. A remainder is left out.
        rank: this rank; None: of the process group, or 0 without one.
        shuffle: as in `ChunkedSampler`, and so are shufflefirst, seed and chunksize.
        drop_last: not used.
    """
    grouped = dist.is_available() and dist.is_initialized()
    num_replicas = num_replicas or (dist.get_world_size() if grouped else 1)
    rank = rank if rank is not None else (dist.get_rank() if grouped else 0)
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank={rank}, and must be from 0 to {num_replicas - 1}, for num_replicas={num_replicas}")
    own = (num_samples or len(dataset)) // num_replicas
    return ChunkedSampler(
        dataset,
        num_samples=(rank * own, (rank + 1) * own),
        chunksize=chunksize,
        seed=seed,
        shuffle=shuffle,
        shufflefirst=shufflefirst,
    )


class ShardedSampler(_RangeSampler):
    """Shuffles the shards of a data set, and the samples in each.

    Args:
        dataset: a `ShardListDataset`.
        lengths: of the shards; None: the lengths that the data set gives.
        batch_size: not used.
        shufflefirst: whether to shuffle the shards of the first pass, too.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        lengths: Sequence[int] | None = None,
        batch_size: int | None = None,
        shufflefirst: bool = False,
    ) -> None:
        ends = accumulate(dataset.lengths if lengths is None else lengths, initial=0)
        super().__init__(list(pairwise(ends)), 0, True, shufflefirst)
