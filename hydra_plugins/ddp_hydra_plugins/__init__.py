"""Register `hydra/launcher=dask_ddp` and `hydra/sweeper=pbt`. Hydra 1.3 finds plugins only in this namespace."""

from ddp_hydra.config.hydra_compat import register
from ddp_hydra.sweep.launcher import GangLauncher
from ddp_hydra.sweep.pbt import PopulationSettings, PopulationSweeper


class DaskDDPLauncher(GangLauncher):
    """Runs the jobs of a sweep on Dask. Hydra wants the class in this module."""


class PBTSweeper(PopulationSweeper):
    """Trains a population of jobs, the worst of which copy the best. Hydra wants the class in this module."""


register(
    "hydra/launcher/dask_ddp",
    {
        "_target_": f"{__name__}.{DaskDDPLauncher.__qualname__}",
        "_recursive_": False,
        "max_jobs": None,
        "fail_fast": False,
        "resume": None,
        "retry_failed": False,
        "job_timeout_s": None,
        "ranks": None,
        "cluster": None,
        "direction": None,
        "keep": "all",
        "stop": None,
    },
)
register(
    "hydra/sweeper/pbt",
    {
        "_target_": f"{__name__}.{PBTSweeper.__qualname__}",
        "_recursive_": False,
        **vars(PopulationSettings()),
        "params": {},
    },
)
