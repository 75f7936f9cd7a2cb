"""Samplers: they say which samples each rank reads, and in which order.

The global sequence of an epoch is a pure function of (seed, epoch), and the position in it is counted in samples. A
global batch is the next `batch_size * world_size` samples of the sequence; the ranks share it evenly. So a run that
stops and resumes with another world size or batch size continues at the same position, and all ranks have equally many
full batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import count, cycle, islice
from typing import Any

import numpy as np

from ddp_hydra.console.text import counted
from ddp_hydra.data.draws import Indices, ordered
from ddp_hydra.errors import ConfigError


@dataclass
class Sampler(ABC):
    """Gives every rank batches of equal size from a global sequence; a subclass orders the sequence.

    It is also a batch sampler for a plain `DataLoader`: `set_epoch`, then iterate.

    Args:
        n_samples: length of the data set.
        batch_size: samples per rank and step.
        rank: this rank.
        world_size: number of ranks.
        seed: of the order, together with the epoch.
        drop_last: leave out the samples at the end of an epoch that do not fill a global batch; otherwise the last
            global batch is filled with samples from the beginning of the epoch.

    Raises:
        ConfigError: with `drop_last` no full global batch is left.
    """

    n_samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    _: KW_ONLY
    seed: int = 0
    drop_last: bool = True

    def __post_init__(self) -> None:
        self._epoch = 0
        if self.n_samples < 1 or self.batch_size < 1:
            raise ConfigError(
                f"sampler: got {self.n_samples} samples and data.batch_size={self.batch_size}; both must be at least 1"
            )
        if self.drop_last and self.n_samples < self.global_batch:
            most = self.n_samples // self.world_size
            smaller = f"data.batch_size={most} or less (times trainer.gradient_accumulation_steps)"
            fewer = f"dispatch.ranks={self.n_samples} or less with data.batch_size=1"
            raise ConfigError(
                f"the data set has {counted(self.n_samples, 'sample')}, fewer than one global batch of "
                f"{self.global_batch} ({self.batch_size} x {counted(self.world_size, 'rank')}), so with "
                "sampler.drop_last=true no step is left: give "
                f"{smaller if most else fewer}, or sampler.drop_last=false"
            )

    @abstractmethod
    def order(self, epoch: int) -> np.ndarray:
        """Return the global sequence of an epoch: indices, (n_samples,)."""

    @property
    def global_batch(self) -> int:
        """Return the number of samples of all ranks in one step."""
        return self.batch_size * self.world_size

    def steps(self, position: int = 0) -> int:
        """Return how many steps are left in an epoch.

        Args:
            position: how many samples of this epoch all ranks together have already seen.
        """
        left = max(0, self.n_samples - position)
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def __len__(self) -> int:
        """Return how many steps an epoch has."""
        return self.steps()

    def batches(self, epoch: int, position: int = 0) -> Iterator[list[int]]:
        """Yield this rank's batches of an epoch, from `position` on, see `steps`."""
        order = np.asarray(self.order(epoch))
        if len(order) < self.n_samples:
            raise ConfigError(
                f"{type(self).__name__}.order({epoch}) has {len(order)} indices, and n_samples is {self.n_samples}: "
                "set self.n_samples to its length, in __post_init__ before super().__post_init__()"
            )
        for _ in range(self.steps(position)):
            positions = np.arange(position, position + self.global_batch)
            own = self.share(epoch, positions)
            yield Indices(order[own % self.n_samples].tolist(), epoch, own.tolist())
            position += self.global_batch

    def share(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return this rank's part of the positions of a global batch, (batch_size,).

        Args:
            epoch: the epoch.
            positions: (global_batch,); behind the end of the epoch, n_samples and more, its first samples come again.
        """
        return positions[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch for iterating."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches(self._epoch)

    def random(self, epoch: int) -> np.random.RandomState:
        """Return the random numbers of an epoch."""
        # The numbers of RandomState never change; default_rng may change them with the numpy version.
        return np.random.RandomState([self.seed & 0xFFFFFFFF, epoch])


@dataclass(kw_only=True)
class Distributed(Sampler):
    """Gives a new global order each epoch, or the order of the data set.

    Args:
        shuffle: use a new order each epoch; otherwise the order of the data set.
        mixture: says how many samples an epoch has of each set, see `Mixture`; None: of all samples, each once.
    """

    shuffle: bool = True
    mixture: Any = None

    def __post_init__(self) -> None:
        if self.mixture is not None:
            self.n_samples = self.mixture.n_samples
        super().__post_init__()

    def order(self, epoch: int) -> np.ndarray:
        """Return the global sequence of an epoch: indices, (n_samples,)."""
        if self.mixture is not None:
            order: np.ndarray = self.mixture.order(self.seed, epoch, self.shuffle)
            return order
        return self.random(epoch).permutation(self.n_samples) if self.shuffle else np.arange(self.n_samples)


@dataclass(kw_only=True)
class Interleaved(Sampler):
    """Interleaves several streams of neighbouring samples.

    The global sequence takes samples from the streams in turns, so that all streams end together. In each global batch
    the streams are dealt to the ranks in order: if there are n streams for each of the ranks, each rank
    keeps its own streams. The sequence depends on the number of streams and not on the number of ranks, so a run can
    resume with another number of ranks.

    Args:
        interleave: how many streams are interleaved.
        shuffle: use a new order each epoch.
    """

    interleave: int = 8
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interleave < 1:
            raise ConfigError(
                f"sampler.interleave={self.interleave}, and must be at least 1: give sampler.interleave=8"
            )
        self._sequence = lru_cache(maxsize=2)(self._interleave)

    @abstractmethod
    def streams(self, epoch: int) -> list[np.ndarray]:
        """Return the indices of each stream, in order."""

    def _interleave(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        # Return the global sequence, (n_samples,), and the stream of each of its samples, (n_samples,).
        streams = self.streams(epoch)
        stream_of = np.repeat(np.arange(len(streams)), [len(stream) for stream in streams])
        # The progress of a stream when a sample is read: equal steps in each stream, so that all end together.
        progress = np.concatenate([(np.arange(len(stream)) + 0.5) / max(1, len(stream)) for stream in streams])
        turns = np.lexsort((stream_of, progress))
        return np.concatenate(streams)[turns], stream_of[turns]

    def order(self, epoch: int) -> np.ndarray:
        """Return the global sequence of an epoch: indices, (n_samples,)."""
        return self._sequence(epoch)[0]

    def share(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return this rank's share of the positions of a global batch, (batch_size,), mostly from its own streams."""
        stream_of = self._sequence(epoch)[1]
        return super().share(epoch, positions[np.argsort(stream_of[positions % self.n_samples], kind="stable")])


@dataclass(kw_only=True)
class Chunked(Interleaved):
    """Shuffles the shards, and the samples within each shard; `interleave` shards are mixed at any time.

    Each epoch deals the shards to the streams, and so to the ranks, in a new way.

    Args:
        shard_lengths: how many samples each shard has; None: the data set has no shards.
        chunk_samples: length of the chunks into which a data set without shards is cut.
        interleave: how many shards are read side by side; more shards mix better, and take more space in the cache.
        shuffle: use a new order of shards, and of samples within them, each epoch.

    Raises:
        ConfigError: the shards are not as long as the data set, or a value is out of its range.
    """

    shard_lengths: Sequence[int] | None = None
    chunk_samples: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_samples < 1:
            raise ConfigError(f"sampler.chunk_samples={self.chunk_samples}, and must be at least 1")
        if self.shard_lengths is None:
            ends = [*range(self.chunk_samples, self.n_samples, self.chunk_samples), self.n_samples]
            self._lengths = np.diff([0, *ends])
        else:
            self._lengths = np.asarray(self.shard_lengths, dtype=np.int64)
        if self._lengths.sum() != self.n_samples:
            raise ConfigError(
                f"the shards have {self._lengths.sum()} samples and the data set {self.n_samples} (shard_lengths)"
            )

    def streams(self, epoch: int) -> list[np.ndarray]:
        """Return the indices of each stream: its share of the shards."""
        order: Any = self.random(epoch).permutation if self.shuffle else np.arange
        starts = np.cumsum(self._lengths) - self._lengths
        shards = [starts[shard] + order(self._lengths[shard]) for shard in order(len(starts))]
        n_streams = min(self.interleave, len(shards))
        return [np.concatenate(shards[stream::n_streams]) for stream in range(n_streams)]


@dataclass(kw_only=True)
class Sharded(Interleaved):
    """Cuts the data set into contiguous parts, and gives each part to the same rank in each epoch.

    Args:
        interleave: how many parts; the number of ranks, or a multiple, gives each rank its own parts.
        shuffle: use a new order within each part each epoch; otherwise the order of the data set.
    """

    def streams(self, epoch: int) -> list[np.ndarray]:
        """Return the indices of each part."""
        random = self.random(epoch)
        parts = np.array_split(np.arange(self.n_samples), min(self.interleave, self.n_samples))
        return [random.permutation(part) for part in parts] if self.shuffle else parts


@dataclass(kw_only=True)
class Weighted(Sampler):
    """Draws samples with replacement, so that rare classes appear more often than in the data set.

    Args:
        targets: (n_samples,) or (n_samples, 1), the class of each sample; or one-hot rows, (n_samples, classes).
        balance: 1: all classes appear equally often; 0: as often as in the data set; values between mix both.

    Raises:
        ConfigError: the targets are not one class for each sample, or `balance` is out of its range.
    """

    targets: Sequence[int] | np.ndarray | None = None
    balance: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.balance <= 1:
            raise ConfigError(f"sampler.balance={self.balance}, and must be from 0 to 1: give sampler.balance=1")
        try:
            _, classes, counts = np.unique(self._classes(), return_inverse=True, return_counts=True)
        except (TypeError, ValueError, RuntimeError) as error:  # rows of several lengths, values without an order
            raise ConfigError(
                f"sampler=weighted needs `targets` of the data set, one class for each of its {self.n_samples:,} "
                f"samples, and {error}: give it such targets, as class numbers, or type sampler=distributed"
            ) from error
        weights = (1.0 / counts)[classes] ** self.balance
        self._ends = np.cumsum(weights) / weights.sum()

    def _classes(self) -> np.ndarray:
        # Return a value for each sample, (n_samples,), alike in a class; ValueError if the targets are no classes.
        if self.targets is None:
            raise ValueError("it has none")
        found = np.asarray(self.targets)
        if found.ndim not in (1, 2) or len(found) != self.n_samples:
            raise ValueError(f"they have the shape {found.shape}")
        if found.ndim == 2 and found.shape[1] != 1:
            if found.dtype.kind not in "biuf" or not np.isin(found, (0, 1)).all() or (found.sum(1) != 1).any():
                raise ValueError(f"they have the shape {found.shape} and are not one-hot")
            return found.argmax(1)
        found = found.reshape(-1)
        is_class = found == found  # NaN is not equal to itself
        if found.dtype.kind == "f":
            is_class = np.isfinite(found)
            if 2 * len(np.unique(found)) > len(found):  # nearly each has its own: they are measured, not classes
                is_class &= found == np.round(found)
        elif found.dtype.kind == "O":
            is_class &= [value is not None for value in found]
        if not is_class.all():
            index = int(is_class.argmin())
            raise ValueError(f"sample {index} has {found[index]}")
        return found

    def order(self, epoch: int) -> np.ndarray:
        """Return the global sequence of an epoch: indices, (n_samples,), some of them several times."""
        drawn = np.searchsorted(self._ends, self.random(epoch).random_sample(self.n_samples), side="right")
        return np.minimum(drawn, self.n_samples - 1)


class Repeated:
    """Repeats the first batches of the first epoch of another sampler; its epochs are as long as the other's."""

    def __init__(self, sampler: Any, batches: int, seed: int = 0) -> None:
        self.sampler, self.first, self.seed = sampler, batches, seed
        self.global_batch = sampler.global_batch

    def __len__(self) -> int:
        return len(self.sampler)

    def steps(self, position: int = 0) -> int:
        """Return how many steps are left in an epoch, see `Sampler.steps`."""
        return int(self.sampler.steps(position))

    def batches(self, epoch: int, position: int = 0) -> Iterator[list[int]]:
        """Yield this rank's batches of an epoch, from `position` on."""
        first = list(islice(ordered(self.sampler.batches, 0, 0, self.seed), self.first))
        begin = (len(self) - self.steps(position)) % len(first)
        again = islice(cycle(enumerate(first)), begin, begin + self.steps(position))
        for start, (number, batch) in zip(count(position, self.global_batch), again, strict=False):
            if isinstance(batch, Indices):  # what a data set draws is as new as in another epoch
                ahead = start - number * self.global_batch
                batch = Indices(batch, epoch, [place + ahead for place in batch.positions])
            yield batch
