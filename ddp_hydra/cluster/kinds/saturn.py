"""Clusters of Saturn Cloud."""

from __future__ import annotations

import os
from typing import Any

from ddp_hydra.cluster.connection import Scheduler
from ddp_hydra.cluster.kinds.base import Manager
from ddp_hydra.errors import ClusterError


class Saturn(Manager):
    """`dask_saturn.SaturnCluster`: starts the one cluster of a resource, or uses it if it runs."""

    hint = "its page in Saturn Cloud may say more"

    def check(self) -> None:
        """Check that the credentials are set."""
        super().check()
        missing = [name for name in ("SATURN_BASE_URL", "SATURN_TOKEN") if not os.environ.get(name)]
        if missing:
            raise ClusterError(
                f"cluster=saturn: {' and '.join(missing)} are not set in the environment: copy both from Saturn Cloud "
                "(a resource's page, Connect Externally), and export them"
            )

    def client(self, cluster: Any) -> Any:
        """Connect by the address: the class was written for an older Dask, and clients use attributes that it lacks."""
        return Scheduler(cluster.scheduler_address, cluster.security).client()

    def scale(self, cluster: Any, workers: int) -> None:
        """Ask for more workers if the running cluster has fewer."""
        if self.n_workers is not None and 0 < workers < self.n_workers:
            cluster.scale(self.n_workers)

    def reuse_with(self, cluster: Any) -> str:
        """Return what to type: the resource alone identifies the cluster."""
        return "cluster=saturn"

    def status(self, cluster: Any) -> str:
        """Say which status Saturn Cloud gives the cluster."""
        return f"Saturn Cloud says that the cluster {cluster.name} is {cluster.status}"
