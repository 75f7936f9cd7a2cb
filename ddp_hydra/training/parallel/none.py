"""`parallel=none`: the bare model on one rank."""

from __future__ import annotations

from ddp_hydra.training.parallel import Parallel


class Unwrapped(Parallel):
    """Trains on one rank, without a wrapper.

    Raises:
        ConfigError: there are several ranks.
    """

    one_rank_name = "none"
