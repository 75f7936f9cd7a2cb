"""Clusters of Saturn Cloud."""

from __future__ import annotations

import os
from typing import Any

from ddp_hydra.cluster.connection import Scheduler
from ddp_hydra.cluster.kinds.base import Manager
from ddp_hydra.errors import ClusterError


class Saturn(Manager):
    """`dask_saturn.SaturnCluster`: one cluster for each resource, which is started, or found running."""

    look_at = "its page in Saturn Cloud may say more"

    def check(self) -> None:
        """Look for the credentials."""
        super().check()
        missing = [name for name in ("SATURN_BASE_URL", "SATURN_TOKEN") if not os.environ.get(name)]
        if missing:
            raise ClusterError(
                f"cluster=saturn: {' and '.join(missing)} are not set in the environment: copy both from Saturn Cloud "
                "(a resource's page, Connect Externally), and export them"
            )

    def client(self, cluster: Any) -> Any:
        """Connect past the class, which is of an older Dask: some of what a client asks of it is not there any more."""
        return Scheduler(cluster.scheduler_address, cluster.security).client()

    def size(self, cluster: Any, workers: int) -> None:
        """Ask for more workers where it was found running with fewer."""
        if self.n_workers is not None and 0 < workers < self.n_workers:
            cluster.scale(self.n_workers)

    def again(self, cluster: Any) -> str:
        """It is found by its resource."""
        return "cluster=saturn"

    def ask(self, cluster: Any) -> str:
        """Say how Saturn sees it."""
        return f"Saturn Cloud says that the cluster {cluster.name} is {cluster.status}"
