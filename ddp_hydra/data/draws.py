"""Seeds the global generators of torch, numpy and Python by the place of a sample in its epoch.

So what a data set draws is the same in every run, whatever the workers, ranks, batches and resumes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch

EVALUATION = -1
"""Stands for the epoch where a data set is validated, evaluated or predicted: each pass draws the same."""
_OF_A_BATCH = 1
_MASK = 2**64 - 1


def seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed % 2**64)  # torch.manual_seed looks for devices: 200 times as long
    np.random.seed(seed % 2**32)
    random.seed(seed)


def mixed(*key: int) -> int:
    found = 0
    for part in key:  # the finaliser of splitmix64
        found = (found + part + 0x9E3779B97F4A7C15) & _MASK
        found = ((found ^ (found >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        found = ((found ^ (found >> 27)) * 0x94D049BB133111EB) & _MASK
        found ^= found >> 31
    return found


def seed_by(*key: int) -> None:
    seed_all(mixed(*key))


def _states() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


class StateGuard:
    """Restores the three generators after a block."""

    def __init__(self) -> None:
        self.states = _states()

    def __enter__(self) -> None: ...

    def has_moved(self) -> bool:
        """Return whether something was drawn in the block so far."""
        (own, (_, keys, *rest), python), (torchs, (_, before, *others), pythons) = _states(), self.states
        return not (torch.equal(own, torchs) and np.array_equal(keys, before) and (rest, python) == (others, pythons))

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        torch_state, numpy_state, python_state = self.states
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def tell_epoch(data: Any, epoch: int, seed: int | None) -> None:
    # seed: of the run; None leaves the generators as they are.
    if not hasattr(data, "set_epoch"):
        return
    if seed is None:
        data.set_epoch(epoch)
        return
    with StateGuard():
        seed_by(seed, epoch)
        data.set_epoch(epoch)


def ordered(batches: Callable[[int, int], Iterable[Any]], epoch: int, position: int, seed: int) -> Iterator[Any]:
    # A sampler's batches. All ranks draw one order, also after a resume.
    with StateGuard():
        seed_by(seed, epoch)
        found = iter(batches(epoch, position))
        first = list(islice(found, 1))  # a generator draws the order only now
    return chain(first, found)


class Indices(list[int]):
    """The indices of a batch, with the epoch, and the positions of the samples in its order, over all ranks.

    Without positions, a sample's index is its position.
    """

    def __init__(
        self, indices: Iterable[int], epoch: int = EVALUATION, positions: Sequence[int] | None = None, seed: int = 0
    ) -> None:
        super().__init__(indices)
        self.epoch, self.seed = epoch, seed
        self.positions: Sequence[int] = self if positions is None else positions

    def __reduce__(self) -> tuple[Any, ...]:
        return Indices, (list(self), self.epoch, list(self.positions), self.seed)

    def part(self, begin: int, end: int) -> Indices:
        return self.of(self[begin:end], self.positions[begin:end])

    def of(self, indices: Iterable[int], positions: Sequence[int]) -> Indices:
        return Indices(indices, self.epoch, positions, self.seed)

    def seed_sample(self, place: int) -> None:
        seed_by(self.seed, self.epoch, self.positions[place])

    def seed_batch(self) -> None:
        seed_by(self.seed, self.epoch, self.positions[0] if self.positions else 0, _OF_A_BATCH)


def placed(batch: Iterable[int], seed: int) -> Indices:
    found = batch if isinstance(batch, Indices) else Indices(batch)
    found.seed = seed
    return found


def numbered(batches: Any, epoch: int, position: int, global_batch: int, rank: int) -> Iterator[Indices]:
    for start, batch in zip(count(position, global_batch), batches, strict=False):
        if isinstance(batch, Indices):
            yield batch
        else:
            indices = list(batch)  # it may be an iterator
            first = start + rank * len(indices)
            yield Indices(indices, epoch, range(first, first + len(indices)))
