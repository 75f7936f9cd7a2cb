"""A cluster for the time of a job: any Dask cluster class by its `_target_`, with its native arguments."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import dask
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.errors import ClusterError
from ddp_hydra.versions import instantiate

QUIET = {
    "logging.distributed": "warning",
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.worker.memory.monitor-interval": "2s",
    "distributed.deploy.lost-worker-timeout": "1h",
}
"""Dask at rest on the cores where ranks compute: watching itself, it takes 3 % of a core per process otherwise. And
nannies stay: Dask would close one whose worker is not there 15 s after it was lost, be it lost once more by then."""
OURS = ("wait_timeout_s",)
"""Keys of a cluster's config that are not arguments of its class."""


class Inline:
    """`cluster=inline`: no cluster; one rank in this process."""


class Remote:
    """`cluster=remote`: a scheduler that somebody else has started, and that stays when the job has ended.

    Args:
        address: "tcp://host:8786".
        n_workers: how many to wait for; jobs use as many as `dispatch.ranks` says, or all that are there.
    """

    def __init__(self, address: str, n_workers: int | None = None) -> None:
        self.address, self.n_workers = address, n_workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it as it is."""

    def get_client(self) -> Any:
        """Connect, as to clusters of Dask's own."""
        return Scheduler(self.address).client()


def is_inline(cfg: DictConfig) -> bool:
    """Whether the job runs in this process."""
    return bool(cfg.get("_target_") == f"{Inline.__module__}.{Inline.__qualname__}")


def is_local(cfg: DictConfig) -> bool:
    """Whether the workers will be children of this process, in its own environment."""
    return str(cfg.get("_target_", "")).rpartition(".")[2] in ("LocalCluster", "LocalCUDACluster")


def load() -> None:
    """Import Dask's distributed, which sets up its loggers at that moment: from warnings on."""
    with dask.config.set({"logging.distributed": QUIET["logging.distributed"]}):
        import distributed  # noqa: F401


@contextmanager
def connect(cfg: DictConfig) -> Iterator[Any]:
    """Bring up a cluster, wait for its workers, and take it down at the end; or use the one that is lent.

    Args:
        cfg: `_target_` and its arguments; n_workers, wait_timeout_s.

    Yields:
        The `distributed.Client`.

    Raises:
        ClusterError: it cannot be started, or too few workers came in time.
    """
    with ExitStack() as stack:
        yield start(cfg, stack) if _lent is None else stack.enter_context(_lent.client())


@dataclass(frozen=True)
class Scheduler:
    """Where a cluster that somebody else has brought up can be reached.

    Args:
        address: of its scheduler.
        security: for TLS, as Dask's clients take it.
        sweep: on whose behalf workers are reserved there.
    """

    address: str
    security: Any = None
    sweep: str = ""

    def client(self) -> Any:
        """Connect.

        Raises:
            ClusterError: it does not answer.
        """
        load()
        from distributed import Client

        with dask.config.set(QUIET):
            try:
                return Client(self.address, security=self.security)
            except OSError as error:
                raise ClusterError(f"the scheduler {self.address} does not answer: {error}") from error


_lent: Scheduler | None = None


def lend(scheduler: Scheduler) -> None:
    """Have all jobs of this process use a cluster that is there already."""
    global _lent
    _lent = scheduler


def sweep() -> str:
    """On whose behalf this process reserves workers: that of a sweep, or "" for its own."""
    return _lent.sweep if _lent else ""


def start(cfg: DictConfig, stack: ExitStack) -> Any:
    """Start a cluster whose end is up to `stack`; returns its client.

    Raises:
        ClusterError: it cannot be started, or too few workers came in time.
    """
    if is_local(cfg):
        # Importing torch takes longer than starting workers, so it begins first, beside them.
        from ddp_hydra.rank_host import warm

        warm.hold()
        stack.callback(warm.release)
    load()
    stack.enter_context(dask.config.set(QUIET))

    native = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in OURS])
    try:
        cluster = stack.enter_context(instantiate(native))
        client = stack.enter_context(cluster.get_client())
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Hydra and Dask wrap what has happened
            cause = cause.__cause__
        raise ClusterError(f"cluster {cfg.get('_target_')} could not be started: {cause!r}") from error
    wait_for_workers(client, cfg.get("n_workers") or 1, cfg.get("wait_timeout_s", 60.0))
    return client


def wait_for_workers(client: Any, n_workers: int, timeout_s: float) -> None:
    """Wait until so many workers are there.

    Raises:
        ClusterError: saying how many came.
    """
    begin = time.monotonic()
    try:
        client.wait_for_workers(n_workers, timeout=timeout_s)
    except TimeoutError:
        came = len(client.scheduler_info(n_workers=-1)["workers"])
        raise ClusterError(
            f"{came} of {n_workers} workers came in {time.monotonic() - begin:.0f} s: look at the cluster's own logs, "
            f"ask for fewer with cluster.n_workers={came or 1}, or wait longer with cluster.wait_timeout_s"
        ) from None
