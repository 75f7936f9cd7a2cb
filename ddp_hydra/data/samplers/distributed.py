"""Global shuffle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_hydra.data.samplers.base import Sampler


@dataclass(kw_only=True)
class Distributed(Sampler):
    """A new global order each epoch, or the data set's own.

    Args:
        shuffle: a new order each epoch; otherwise the data set's own.
    """

    shuffle: bool = True

    def order(self, epoch: int) -> np.ndarray:
        """Return the global sequence of indices of an epoch, (n_samples,)."""
        return self.random(epoch).permutation(self.n_samples) if self.shuffle else np.arange(self.n_samples)
