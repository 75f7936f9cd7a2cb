"""Keeps neighbouring samples together: the samples of one file are read by few ranks, one after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ddp_hydra.data.samplers.base import Sampler
from ddp_hydra.errors import ConfigError


@dataclass(kw_only=True)
class Interleaved(Sampler):
    """Interleaves several streams of neighbouring samples.

    The global sequence takes samples from the streams in turns, so that all streams end together. In each global batch
    the streams are dealt to the ranks in order: if the number of streams is that of the ranks or a multiple, each rank
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
        """Return the global sequence, (n_samples,), and the stream of each of its samples, (n_samples,)."""
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
                f"the shards have {self._lengths.sum()} samples and the data set {self.n_samples}: a data set's "
                "shard_lengths must add up to its length"
            )

    def streams(self, epoch: int) -> list[np.ndarray]:
        """Return the indices of each stream: its share of the shards."""
        random = self.random(epoch)
        starts = np.cumsum(self._lengths) - self._lengths
        shards = random.permutation(len(starts)) if self.shuffle else np.arange(len(starts))
        n_streams = min(self.interleave, len(starts))
        streams: list[list[np.ndarray]] = [[] for _ in range(n_streams)]
        for turn, shard in enumerate(shards):
            length = self._lengths[shard]
            inside = random.permutation(length) if self.shuffle else np.arange(length)
            streams[turn % n_streams].append(starts[shard] + inside)
        return [np.concatenate(stream) for stream in streams]


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
