"""Reads samples of rare classes more often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_hydra.data.samplers.base import Sampler
from ddp_hydra.errors import ConfigError


@dataclass(kw_only=True)
class Weighted(Sampler):
    """Draws samples with replacement, so that rare classes appear more often than in the data set.

    Args:
        targets: (n_samples,), the class number of each sample.
        balance: 1: all classes appear equally often; 0: as often as in the data set; values between mix both.

    Raises:
        ConfigError: the data set has no classes, or `balance` is out of its range.
    """

    targets: Sequence[int] | np.ndarray | None = None
    balance: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.balance <= 1:
            raise ConfigError(f"sampler.balance={self.balance}, and must be from 0 to 1: give sampler.balance=1")
        if self.targets is None or len(self.targets) != self.n_samples:
            raise ConfigError(
                "sampler=weighted balances classes, and the data set has no `targets` with the class of each of its "
                f"{self.n_samples} samples: give sampler=distributed"
            )
        _, classes, counts = np.unique(np.asarray(self.targets), return_inverse=True, return_counts=True)
        weights = (1.0 / counts)[classes] ** self.balance
        self._ends = np.cumsum(weights) / weights.sum()

    def order(self, epoch: int) -> np.ndarray:
        """Return the global sequence of an epoch: indices, (n_samples,), some of them several times."""
        drawn = np.searchsorted(self._ends, self.random(epoch).random_sample(self.n_samples), side="right")
        return np.minimum(drawn, self.n_samples - 1)
