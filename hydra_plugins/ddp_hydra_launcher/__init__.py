"""`hydra/launcher=dask_ddp`. Hydra 1.3 finds launchers in this namespace only; the work is in `ddp_hydra.sweep`."""

from ddp_hydra.config.hydra_compat import register
from ddp_hydra.sweep.launcher import GangLauncher


class DaskDDPLauncher(GangLauncher):
    """The launcher under the name that Hydra wants."""


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
    },
)
