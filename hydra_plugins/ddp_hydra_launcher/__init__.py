"""`hydra/launcher=dask_ddp`. Hydra 1.3 finds launchers in this namespace only; the work is in `ddp_hydra.sweep`."""

from hydra.core.config_store import ConfigStore

from ddp_hydra.sweep import SharedClusterLauncher


class DaskDDPLauncher(SharedClusterLauncher):
    """The launcher under the name that Hydra wants."""


ConfigStore.instance().store(
    group="hydra/launcher",
    name="dask_ddp",
    node={"_target_": f"{__name__}.{DaskDDPLauncher.__qualname__}"},
    provider="ddp_hydra",
)
