"""`parallel=none`: the bare model on one rank."""

from __future__ import annotations

from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.training.parallel import Parallel


class Unwrapped(Parallel):
    """Trains on one rank, without a wrapper.

    Raises:
        ConfigError: there are several ranks.
    """

    def __init__(self, world: World = ALONE) -> None:
        super().__init__(world)
        self._refuse_several_ranks("none")
