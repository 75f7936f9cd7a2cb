"""The base class of the training samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np

from ddp_hydra.data.draws import Indices
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
            raise ConfigError(
                f"the data set has {self.n_samples} samples, fewer than one global batch of {self.global_batch} "
                f"(data.batch_size={self.batch_size} x {self.world_size} ranks), so with sampler.drop_last=true no "
                f"step is left: give data.batch_size={max(1, self.n_samples // self.world_size)} or less, or "
                "sampler.drop_last=false"
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
        order = self.order(epoch)
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
        # The numbers of RandomState never change; those of default_rng may change with the numpy version.
        return np.random.RandomState([self.seed & 0xFFFFFFFF, epoch])
