"""The gang: one pinned task per rank, started together, watched, and stopped together.

As a library:

    values = dispatch.run(client, train, "resnet18", lr=0.1)      # every worker, inside a process group
    values = dispatch.Gang(client, ranks=4, backend="gloo").run(train, "resnet18", lr=0.1)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Client

from ddp_hydra import placement
from ddp_hydra.attempt import Attempt
from ddp_hydra.placement import RankSpec
from ddp_hydra.project import Project
from ddp_hydra.rank_host import relay
from ddp_hydra.reservation import reserved
from ddp_hydra.results import Record


def run(client: Client, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> list[Any]:
    """Run a function on every worker, each call one rank of a process group.

    Args:
        client: of the Dask cluster.
        fn: the function, or "module:name" to import it on the ranks only.
        args: passed to it.
        kwargs: passed to it.

    Returns:
        What the ranks returned, in order of rank: plain data, arrays and tensors.

    Raises:
        RankFailed: a rank raised, exited or was killed; the message names the first.
        ClusterError: the workers are held by other jobs.
    """
    return Gang(client).run(fn, *args, **kwargs)


@dataclass
class Gang:
    """How a gang is to be dispatched.

    Args:
        client: of the Dask cluster.
        ranks: number of ranks; None for one on each worker.
        name: shown by Dask's dashboard and `ps`; made unique.
        backend: gloo, nccl, or auto (by device).
        project: packed project space that the ranks import from.
        on_record: called with each record, on the calling thread, in each rank's order.
        threads: CPU threads per rank; 0 shares each host's cores out.
        timeout_s: of the ranks' collectives.
        queue_timeout_s: how long to wait for workers that other jobs hold.
        start_timeout_s: how long the ranks may take to come up.
        port_range: ports allowed for the rendezvous; None for any free one.
        files: files of the client that rank 0 needs; where there are any, `fn` is called with files={name: path there}.
    """

    client: Client
    ranks: int | None = None
    name: str = "gang"
    backend: str = "auto"
    project: Project | None = None
    on_record: Callable[[Record], None] = field(default=lambda record: None, repr=False)
    threads: int = 0
    timeout_s: float = 1800.0
    queue_timeout_s: float = 86400.0
    start_timeout_s: float = 300.0
    port_range: tuple[int, int] | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    attempt: Attempt | None = field(default=None, init=False, repr=False)
    world_size: int = field(default=0, init=False, repr=False)

    def run(self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on each rank; see `dispatch.run`."""
        name = f"{self.name}-{secrets.token_hex(4)}"
        with reserved(self.client, name, self.ranks, self.queue_timeout_s) as workers:
            self.world_size = len(workers)
            self.attempt = Attempt(self, name, placement.plan(workers))
            try:
                if self.files:
                    kwargs["files"] = self.attempt.send(self.files)
                with self.attempt.submitted(cloudpickle.dumps((fn, args, kwargs))):
                    return self.attempt.watch()
            finally:
                self.attempt.clean_up()
                self.attempt = None

    def fetch(self, record: Record, target: Path) -> None:
        """Bring the file of a record home; for the writers, while the gang runs."""
        assert self.attempt is not None, "fetch belongs into on_record"
        self.attempt.fetch(record, target)

    def order(self, name: str, spec: RankSpec, call: bytes) -> relay.Order:
        """What the worker of one rank is told."""
        return relay.Order(
            gang=name,
            attempt=0,
            spec=spec,
            call=call,
            project=self.project,
            backend=self.backend,
            timeout_s=self.timeout_s,
            threads=self.threads,
            ports=self.port_range,
            cwd=str(Path.cwd()),
        )
