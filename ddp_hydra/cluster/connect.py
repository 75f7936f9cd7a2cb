"""A cluster for the time of a job: any Dask cluster class by its `_target_`, with its native arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import dask
from omegaconf import DictConfig

from ddp_hydra.cluster.by_source import Shipped
from ddp_hydra.cluster.connection import QUIET, Scheduler, load, without_broadcasts
from ddp_hydra.cluster.kinds.base import Manager
from ddp_hydra.cluster.kinds.gateway import Gateway
from ddp_hydra.cluster.kinds.kubernetes import Kubernetes
from ddp_hydra.cluster.kinds.local import Local, LocalCuda
from ddp_hydra.cluster.kinds.remote import Remote, Remotely
from ddp_hydra.cluster.kinds.saturn import Saturn
from ddp_hydra.cluster.kinds.slurm import Slurm
from ddp_hydra.cluster.kinds.ssh import Ssh
from ddp_hydra.cluster.wait_for_workers import count, wait_for_workers
from ddp_hydra.errors import ClusterError, DdpHydraError

__all__ = ["Remote", "Scheduler", "connect", "is_inline", "is_local", "load", "start", "sweep", "use_existing"]

log = logging.getLogger(__name__)
MANAGERS: dict[str, type[Manager]] = {
    "GatewayCluster": Gateway,
    "KubeCluster": Kubernetes,
    "LocalCUDACluster": LocalCuda,
    "LocalCluster": Local,
    "Remote": Remotely,
    "SLURMCluster": Slurm,
    "SSHCluster": Ssh,
    "SaturnCluster": Saturn,
}
"""What needs more than its class: by the last part of its `_target_`. For all others `Manager` itself will do."""


class Inline:
    """`cluster=inline`: no cluster; one rank in this process."""


def is_inline(cfg: DictConfig) -> bool:
    """Whether the job runs in this process."""
    return bool(cfg.get("_target_") == f"{Inline.__module__}.{Inline.__qualname__}")


def is_local(cfg: DictConfig) -> bool:
    """Whether the workers will be children of this process, in its own environment."""
    return issubclass(_kind(cfg), Local)


def _kind(cfg: DictConfig) -> type[Manager]:
    return MANAGERS.get(str(cfg.get("_target_", "")).rpartition(".")[2], Manager)


@contextmanager
def connect(cfg: DictConfig, logs: Path | None = None) -> Iterator[Any]:
    """Bring up a cluster, wait for its workers, and take it down at the end; or use the one that is lent.

    Args:
        cfg: `_target_` and its arguments; n_workers, wait_timeout_s, keep.
        logs: folder for what its workers print, where it does not come here.

    Yields:
        The `distributed.Client`.

    Raises:
        ClusterError: it cannot be started, or too few workers came in time.
    """
    with ExitStack() as stack:
        yield start(cfg, stack, logs=logs) if _lent is None else stack.enter_context(_lent.client())


_lent: Scheduler | None = None


def use_existing(scheduler: Scheduler) -> None:
    """Have all jobs of this process use a cluster that is there already."""
    global _lent
    _lent = scheduler


def sweep() -> str:
    """On whose behalf this process reserves workers: that of a sweep, or "" for its own."""
    return _lent.sweep if _lent else ""


def start(cfg: DictConfig, stack: ExitStack, say: Callable[[str], object] = log.info, logs: Path | None = None) -> Any:
    """Start a cluster whose end is up to `stack`; returns its client.

    Args:
        cfg: as of `connect`.
        stack: ends it.
        say: told how to use a cluster again that is left running.
        logs: as of `connect`.

    Raises:
        ClusterError: it cannot be started, or too few workers came in time.
    """
    manager = _kind(cfg)(cfg, logs)
    manager.check()
    if is_local(cfg):
        # Importing torch takes longer than starting workers, so it begins first, beside them.
        from ddp_hydra.rank import fork_client

        fork_client.hold()
        stack.callback(fork_client.release)
    load()
    stack.enter_context(dask.config.set(QUIET))
    stack.enter_context(without_broadcasts())
    try:
        cluster = stack.enter_context(manager.open())
        client = stack.enter_context(manager.client(cluster))
        manager.size(cluster, count(client))
    except DdpHydraError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Hydra and Dask wrap what has happened
            cause = cause.__cause__
        raise ClusterError(manager.explain(cause)) from error
    wait_for_workers(
        client,
        manager.expected,
        manager.wait_timeout_s,
        lambda: manager.ask(cluster),
        manager.look_at,
        lambda: manager.refused(cluster),
    )
    _arrange_end(manager, cluster, client, stack, say)
    return client


def _arrange_end(manager: Manager, cluster: Any, client: Any, stack: ExitStack, say: Callable[[str], object]) -> None:
    """See to it that the cluster ends with us, even if we are killed; or that it stays."""
    if not manager.is_watched and not hasattr(cluster, "shutdown_on_close"):
        return
    if hasattr(cluster, "shutdown_on_close"):
        cluster.shutdown_on_close = not manager.keep
    if manager.is_watched:
        from ddp_hydra.cluster import idle_shutdown

        holder = None if manager.keep else client.id
        client.run_on_scheduler(Shipped(idle_shutdown.take), holder, manager.client_timeout_s)
    if manager.keep:
        name = getattr(cluster, "name", manager.name)
        say(f"the cluster {name} is left running: the next job uses it with {manager.again(cluster)}")
    elif hasattr(cluster, "shutdown_on_close"):
        stack.callback(_leave_to_others, cluster, client)


def _leave_to_others(cluster: Any, client: Any) -> None:
    """Don't end a cluster under the jobs of others."""
    from ddp_hydra.cluster import idle_shutdown

    with suppress(OSError, TimeoutError):
        if jobs := client.run_on_scheduler(Shipped(idle_shutdown.others), client.id):
            log.warning("the cluster %s is left to %d other jobs that are at work there", cluster.name, jobs)
            cluster.shutdown_on_close = False
