"""Reads the samples of an iterable data set that belong to one rank, from any position on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from ddp_hydra.data import draws, wrappers
from ddp_hydra.data.batch import no_sample
from ddp_hydra.data.summary import summary

PLAIN = (type(None), bool, int, float, str, bytes, Tensor)
"""Values that a checkpoint can hold."""
COMPARED = 4
"""Samples by which ranks tell whether they read the same ones."""


@dataclass
class Part:
    """One rank's part of an iterable data set.

    Args:
        dataset: gives the samples of an epoch each time that it is iterated over.
        rank: this rank.
        world_size: number of ranks.
        dealt: `dataset` gives the samples of all ranks, and each rank takes its share of them; otherwise it gives this
            rank's samples only.
        is_global: all ranks together read one sequence, whatever their number.
        by_state: use the `state_dict` of the data set to resume; otherwise read again what was read before.
        how: how it is split and resumed, for a person to read.
        progress: called after each sample that is read.
        seed: seed the global generators by it and by the number of each sample; None: do not.
        training: the epochs draw differently; otherwise each pass draws the same.

    Attributes:
        n_read: samples that were read since `open`, also those that were left out.
        first: summaries of the first of them.
    """

    dataset: Iterable[Any]
    rank: int = 0
    world_size: int = 1
    dealt: bool = True
    is_global: bool = True
    by_state: bool = False
    how: str = ""
    progress: Callable[[], None] = lambda: None
    seed: int | None = None
    training: bool = True
    stopped: bool = field(default=False, init=False)
    n_read: int = field(default=0, init=False)
    first: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        # Of so many shares that `dataset` gives, this rank takes this one.
        self.shares, self.share = (self.world_size, self.rank) if self.dealt else (1, 0)
        self.samples: Iterator[Any] = iter(())

    def open(self, epoch: int, position: int = 0, state: Any = None) -> None:
        """Begin to read.

        Args:
            epoch: the epoch to read.
            position: samples of the epoch that all ranks together have read already.
            state: of the data set at this position; None to read again what lies before it.
        """
        self.stopped, self.n_read, self.first = False, 0, []
        for data in (self.dataset, *wrappers.inner_sets(wrappers.unwrapped(self.dataset))):
            draws.tell_epoch(data, epoch, self.seed)
        if state is not None:
            self.dataset.load_state_dict(state)  # type: ignore[attr-defined]
        key = epoch if self.training else draws.EVALUATION
        read_before = position * self.shares // self.world_size
        self.samples = self._watched(key, read_before if state is not None else 0)
        if state is None:
            self._leave_out(read_before)

    def take(self, n: int) -> list[Any] | None:
        """Return this rank's samples of the next global batch; None if there is no full one.

        Args:
            n: samples of each rank.
        """
        if not self._leave_out(self.share * n):
            return None
        own = list(islice(self.samples, n))
        is_full = self._leave_out((self.shares - 1 - self.share) * n)
        return own if is_full and len(own) == n else None

    def once(self) -> Iterator[tuple[int, Any]]:
        """Yield each sample that is left and its number; all ranks together yield every sample once."""
        for number, sample in enumerate(self.samples):
            if number % self.shares == self.share:
                yield (number if self.dealt else number * self.world_size + self.rank), sample

    def state(self) -> Any:
        """Return the state of the data set as plain values; None if it has none, or one that has others."""
        if not self.by_state:
            return None
        try:
            return plain(self.dataset.state_dict())  # type: ignore[attr-defined]
        except TypeError:
            return None

    def stop(self) -> None:
        """End reading after the sample under way; called from another thread."""
        self.stopped = True

    def _watched(self, key: int, number: int) -> Iterator[Any]:
        if self.seed is not None:
            draws.seed_by(self.seed, key)  # alike on all ranks, as they may share an order that is drawn here
        # The iterator begins here, as the generators are seeded only while samples are read: `__iter__` and the first
        # `__next__` may both draw the order, as those of a DataLoader do.
        try:
            for sample in self.dataset:
                if self.stopped:
                    return
                self.progress()
                self.n_read += 1
                if len(self.first) < COMPARED:
                    self.first.append(summary(sample))
                yield sample
                number += 1
                if self.seed is not None:  # for the next sample; the first one may still draw the order
                    draws.seed_by(self.seed, key, number if self.dealt else number * self.world_size + self.rank)
        except SystemExit as error:
            raise no_sample(self.dataset, f"sample {number}", error) from error

    def _leave_out(self, n: int) -> bool:
        """Read so many samples and drop them; return whether there were as many."""
        return sum(1 for _ in islice(self.samples, n)) == n


@dataclass
class RepeatedPart(Part):
    """Repeats the first steps of the first epoch: a correct model can memorise them.

    Args:
        part: of the data set.
        steps: how many are repeated.
    """

    part: Part = field(kw_only=True)
    steps: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.position, self.kept = 0, list[list[Any]]()

    def open(self, epoch: int, position: int = 0, state: Any = None) -> None:
        """Begin at a position; see `Part.open`."""
        self.position = position
        if not self.kept:
            self.part.open(0)
            self.first = self.part.first

    def take(self, n: int) -> list[Any] | None:
        """Return this rank's samples of the next step."""
        number = self.position // (n * self.world_size) % self.steps
        self.position += n * self.world_size
        while len(self.kept) <= number and (samples := self.part.take(n)) is not None:
            self.kept.append(samples)
        return self.kept[number % len(self.kept)] if self.kept else None


def plain(value: Any) -> Any:
    """Return a state as values that a checkpoint can hold.

    Raises:
        TypeError: it holds others.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict):
        return {plain(key): plain(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(part) for part in value)
    raise TypeError(f"a checkpoint can't hold a {type(value).__name__}")
