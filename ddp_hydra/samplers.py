"""Who reads what: positions in an epoch -> indices of the data set, for one rank.

The order of samples is a pure function of (seed, epoch) over the *global* sequence, and the position is
counted in samples. A global batch is the next `batch_size * world_size` samples of that sequence; rank r takes
its r-th share. So a run that is stopped and goes on with another world size reads on where it left off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ddp_hydra.errors import ConfigError


@dataclass(frozen=True)
class Distributed:
    """Global shuffle (or not), equal batches on every rank.

    Args:
        n_samples: length of the data set.
        batch_size: samples per rank and step.
        rank: this rank.
        world_size: number of ranks.
        seed: with the epoch, fixes the order.
        shuffle: a new order each epoch; otherwise the data set's own.
        drop_last: leave out the samples that do not fill a global batch; otherwise the last global batch is
            filled up from the epoch's beginning.

    Raises:
        ConfigError: there is not one full global batch to drop down to.
    """

    n_samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.n_samples < 1 or self.batch_size < 1:
            raise ConfigError(
                f"sampler: got {self.n_samples} samples and data.batch_size={self.batch_size}; both must be at least 1"
            )
        if self.drop_last and self.n_samples < self.global_batch:
            raise ConfigError(
                f"the data set has {self.n_samples} samples, fewer than one global batch of {self.global_batch} "
                f"(data.batch_size={self.batch_size} x {self.world_size} ranks), so with sampler.drop_last=true no "
                f"step is left: give data.batch_size={max(1, self.n_samples // self.world_size)} or less, or "
                "sampler.drop_last=false"
            )

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return self.batch_size * self.world_size

    @property
    def epoch_samples(self) -> int:
        """Samples that an epoch visits: the length without the dropped, or with the filled-up rest."""
        full, rest = divmod(self.n_samples, self.global_batch)
        return (full + bool(rest and not self.drop_last)) * self.global_batch

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.epoch_samples // self.global_batch

    def order(self, epoch: int) -> np.ndarray:
        """The global sequence of indices, shape (epoch_samples,)."""
        if self.shuffle:
            # RandomState, for its stream is frozen for ever; that of default_rng may change with numpy.
            indices = np.random.RandomState([self.seed & 0xFFFFFFFF, epoch]).permutation(self.n_samples)
        else:
            indices = np.arange(self.n_samples)
        return np.resize(indices, self.epoch_samples)

    def batches(self, epoch: int, position: int = 0) -> Iterator[list[int]]:
        """This rank's batches of an epoch.

        Args:
            epoch: counted from 0.
            position: samples of this epoch that all ranks together have already seen.
        """
        order = self.order(epoch)
        start = position + self.rank * self.batch_size
        while position + self.global_batch <= self.epoch_samples:
            yield order[start : start + self.batch_size].tolist()
            position += self.global_batch
            start += self.global_batch


@dataclass(frozen=True)
class Partition:
    """Every sample exactly once over all ranks, in order, for evaluation: rank r takes r, r + n, r + 2n …

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
