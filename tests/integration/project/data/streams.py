"""Iterable data sets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.tiny import Points


class PointStream(IterableDataset):
    """Gives the points in a new order each epoch.

    Args:
        n: samples.
        seed: of the points.
    """

    classes = Points.classes

    def __init__(self, n: int, seed: int) -> None:
        self.points, self.epoch = Points(n, seed), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(len(self.points), generator=generator).tolist():
            yield self.points[index]


class UnequalParts(PointStream):
    """Splits itself: the last rank has the fewest points."""

    def of_rank(self, rank: int, world_size: int) -> list[Any]:
        return [self.points[index] for index in range(rank, len(self.points) - 20 * rank, world_size)]


class SharedByWorkers(PointStream):
    """Gives each worker of a DataLoader its part, with some noise."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for x, y in islice(super().__iter__(), info.id, None, info.num_workers):
            yield x + 0.01 * torch.randn(x.shape), y


def by_workers(n: int, seed: int) -> DataLoader:
    """Return points that two workers of the user's DataLoader make."""
    return DataLoader(SharedByWorkers(n, seed), batch_size=None, num_workers=2)
