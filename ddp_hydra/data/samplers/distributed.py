"""Shuffles the whole data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_hydra.data.samplers.base import Sampler


@dataclass(kw_only=True)
class Distributed(Sampler):
    """Gives a new global order each epoch, or the order of the data set.

    Args:
        shuffle: use a new order each epoch; otherwise the order of the data set.
    """

    shuffle: bool = True

    def order(self, epoch: int) -> np.ndarray:
        """Return the global sequence of an epoch: indices, (n_samples,)."""
        return self.random(epoch).permutation(self.n_samples) if self.shuffle else np.arange(self.n_samples)
