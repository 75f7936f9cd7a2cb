"""Register `hydra/sweeper=pbt`. Hydra 1.3 finds sweepers only in this namespace; see `ddp_hydra.sweep.pbt`."""

from ddp_hydra.config.hydra_compat import register
from ddp_hydra.sweep.pbt import PopulationSettings, PopulationSweeper


class PBTSweeper(PopulationSweeper):
    """Trains a population of jobs, the worst of which copy the best. Hydra wants the class in this module."""


register(
    "hydra/sweeper/pbt",
    {
        "_target_": f"{__name__}.{PBTSweeper.__qualname__}",
        "_recursive_": False,
        **vars(PopulationSettings()),
        "params": {},
    },
)
