"""Orders that keep neighbours together: what lies in one file is read by few ranks, and in one go."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ddp_hydra.data.samplers.base import Sampler
from ddp_hydra.errors import ConfigError


@dataclass(kw_only=True)
class Lanes(Sampler):
    """Reads several runs of neighbouring samples side by side, each in its own lane.

    The global sequence takes turns between the lanes so that all end together, and the lanes of a global batch are
    dealt to the ranks in order: with as many lanes as ranks, or a multiple, a rank stays in its own. The sequence
    itself depends on the number of lanes and not on that of ranks, so it goes on exactly with other ones.

    Args:
        interleave: runs that are read side by side.
        shuffle: a new order each epoch.
    """

    interleave: int = 8
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interleave < 1:
            raise ConfigError(
                f"sampler.interleave={self.interleave}, and must be at least 1: give sampler.interleave=8"
            )
        self._plan = lru_cache(maxsize=2)(self._interleave)

    @abstractmethod
    def runs(self, epoch: int) -> list[np.ndarray]:
        """Return the indices of each lane, in the order in which it reads them."""

    def _interleave(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the global sequence, and the lane of each of its samples."""
        runs = self.runs(epoch)
        lanes = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
        # How far its lane has come when a sample is read: equal steps in each, so that all end together.
        progress = np.concatenate([(np.arange(len(run)) + 0.5) / max(1, len(run)) for run in runs])
        turns = np.lexsort((lanes, progress))
        return np.concatenate(runs)[turns], lanes[turns]

    def order(self, epoch: int) -> np.ndarray:
        """Return the global sequence of indices of an epoch, (n_samples,)."""
        return self._plan(epoch)[0]

    def share(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return this rank's part of the positions of a global batch: those in its lanes, and as many as all have."""
        lanes = self._plan(epoch)[1]
        return super().share(epoch, positions[np.argsort(lanes[positions], kind="stable")])


@dataclass(kw_only=True)
class Chunked(Lanes):
    """Shuffles shards, and the samples within each; at any time as many shards are mixed as there are lanes.

    Each epoch deals the shards to the lanes, and so to the ranks, anew.

    Args:
        shard_lengths: samples in each shard, as the data set has them; None: it has none.
        chunk_samples: length of the chunks into which a data set without shards is cut.
        interleave: shards that are read side by side; more mix better, and take more room in the cache.
        shuffle: a new order of shards, and of samples within them, each epoch.

    Raises:
        ConfigError: the shards are not as long as the data set, or a value out of its range.
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
                f"the shards have {self._lengths.sum()} samples and the data set {self.n_samples}: a data set's "
                "shard_lengths must add up to its length"
            )

    def runs(self, epoch: int) -> list[np.ndarray]:
        """Return the indices of each lane: every so many-th shard."""
        random = self.random(epoch)
        starts = np.cumsum(self._lengths) - self._lengths
        shards = random.permutation(len(starts)) if self.shuffle else np.arange(len(starts))
        n_lanes = min(self.interleave, len(starts))
        runs: list[list[np.ndarray]] = [[] for _ in range(n_lanes)]
        for turn, shard in enumerate(shards):
            length = self._lengths[shard]
            inside = random.permutation(length) if self.shuffle else np.arange(length)
            runs[turn % n_lanes].append(starts[shard] + inside)
        return [np.concatenate(run) for run in runs]


@dataclass(kw_only=True)
class Sharded(Lanes):
    """Cuts the data set into contiguous parts that stay where they are: rank 0 reads the first, the last the last.

    Args:
        interleave: the parts; as many as ranks, or a multiple, give each rank its own.
        shuffle: a new order within each part each epoch; otherwise the data set's own.
    """

    def runs(self, epoch: int) -> list[np.ndarray]:
        """Return the indices of each part."""
        random = self.random(epoch)
        parts = np.array_split(np.arange(self.n_samples), min(self.interleave, self.n_samples))
        return [random.permutation(part) for part in parts] if self.shuffle else parts
