"""Checks that the workers of a gang have what its ranks need, once for all gangs of a client that need the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from distributed import Client

from ddp_hydra.cluster import preflight


class WorkerChecks:
    """Checks workers for one gang.

    Args:
        client: of the cluster.
        requirements: packages that the ranks need, see `cluster.pip`.
        interface: the network interface that they need; None for any.
    """

    def __init__(self, client: Client, requirements: Sequence[str] = (), interface: str | None = None) -> None:
        self.client, self.requirements, self.interface = client, requirements, interface
        of_client: dict[object, dict[str, Any]] = vars(client).setdefault("_ddp_hydra_probes", {})
        self.good: dict[str, Any] = of_client.setdefault((tuple(requirements), interface), {})

    def check(self, workers: Iterable[str]) -> None:
        """Check that new workers have what the ranks need.

        Raises:
            ClusterError: some do not.
        """
        workers = list(workers)
        new = [address for address in workers if address not in self.good]
        found = preflight.probe(self.client, new, self.requirements)
        if found:  # they have to fit together with those that were looked at before
            all_found = {address: there for address, there in (self.good | dict(found)).items() if address in workers}
            preflight.check(all_found)
            preflight.check_packages(all_found)
            preflight.check_network(all_found, self.interface)
            self.good.update(found)
