"""Clusters that a dask-gateway server starts."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from ddp_hydra.cluster.kinds.base import Manager

log = logging.getLogger(__name__)
REACHING = ("address", "proxy_address", "public_address", "auth")
"""Arguments that say where the gateway is; the others are options of the cluster."""
CHECK = "Is cluster.address the gateway's, and are you let in (cluster.auth, or gateway.auth in Dask's config)?"


class Gateway(Manager):
    """`dask_gateway.GatewayCluster`: the client reaches the scheduler through a TLS proxy, and nothing else.

    `cluster.name` is that of a cluster that runs already.
    """

    look_at = "the logs of the gateway's server say more"

    def open(self) -> Any:
        """Start one, or use one that runs."""
        name = self.arguments.get("name")
        if name is None:
            self.arguments.pop("name", None)
            return super().open()
        reaching = {key: value for key, value in self.arguments.items() if key in REACHING}
        return self.call(f"{self.target}.from_name", {"cluster_name": name, "shutdown_on_close": False, **reaching})

    def size(self, cluster: Any, workers: int) -> None:
        """Ask for more workers, never for fewer: others may use them."""
        if self.n_workers is not None and self.n_workers > workers:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                cluster.scale(self.n_workers)
            for warning in told:  # that there may not be so many
                log.warning("gateway: %s", warning.message)

    def explain(self, error: BaseException) -> str:
        """Say what of the arguments can be wrong."""
        kind, name = type(error).__name__, self.arguments.get("name")
        if kind == "GatewayClusterError" or name is None:
            also = "" if kind.startswith("Gateway") else f". {CHECK}"
        else:
            also = f". Does cluster.name={name} still run? Without it, a new one is started"
        return f"{super().explain(error)}{also}"

    def ask(self, cluster: Any) -> str:
        """Say how the gateway sees it."""
        return f"the gateway says that {cluster.name} is {cluster.gateway.get_cluster(cluster.name).status.name}"
