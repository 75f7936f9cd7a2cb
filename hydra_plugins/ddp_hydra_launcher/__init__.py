"""Register `hydra/launcher=dask_ddp`. Hydra 1.3 finds launchers only in this namespace; see `ddp_hydra.sweep`."""

from ddp_hydra.config.hydra_compat import register
from ddp_hydra.sweep.launcher import GangLauncher


class DaskDDPLauncher(GangLauncher):
    """Runs the jobs of a sweep on Dask. Hydra wants the class in this module."""


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
