"""Clusters that a dask-gateway server starts."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from ddp_hydra.cluster.kinds.base import Manager

log = logging.getLogger(__name__)
CONNECTION = ("address", "proxy_address", "public_address", "auth")
"""Arguments for the connection to the gateway; all others are options of the cluster."""
QUESTION = "Is cluster.address the gateway's, and are you let in (cluster.auth, or gateway.auth in Dask's config)?"


class Gateway(Manager):
    """`dask_gateway.GatewayCluster`: the client reaches only the scheduler, through a TLS proxy.

    `cluster.name` chooses a cluster that runs already.
    """

    hint = "the logs of the gateway's server say more"

    def open(self) -> Any:
        """Start a cluster, or use the running one of this name."""
        name = self.arguments.get("name")
        if name is None:
            self.arguments.pop("name", None)
            return super().open()
        connection = {key: value for key, value in self.arguments.items() if key in CONNECTION}
        arguments = {"cluster_name": name, "shutdown_on_close": False, **connection}
        return self.instantiate(f"{self.target}.from_name", arguments)

    def scale(self, cluster: Any, workers: int) -> None:
        """Ask for more workers, never for fewer: others may use them."""
        if self.n_workers is not None and self.n_workers > workers:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                cluster.scale(self.n_workers)
            for warning in caught:  # the gateway allows fewer
                log.warning("gateway: %s", warning.message)

    def explain(self, error: BaseException) -> str:
        """Say which arguments can be wrong."""
        kind, name = type(error).__name__, self.arguments.get("name")
        if kind == "GatewayClusterError" or name is None:
            advice = "" if kind.startswith("Gateway") else f". {QUESTION}"
        else:
            advice = f". Does cluster.name={name} still run? Without it, a new one is started"
        return f"{super().explain(error)}{advice}"

    def status(self, cluster: Any) -> str:
        """Say which status the gateway gives the cluster."""
        return f"the gateway says that {cluster.name} is {cluster.gateway.get_cluster(cluster.name).status.name}"
