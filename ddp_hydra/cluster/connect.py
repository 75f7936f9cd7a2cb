"""Opens the cluster of a job, any Dask cluster class by its `_target_` and its own arguments; waits for its workers.

Workers may come late, leave again, be replaced, or never come.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import dask
from omegaconf import DictConfig

from ddp_hydra.cluster.connection import QUIET, BySource, Scheduler, load, without_messages
from ddp_hydra.cluster.kinds import Inline, Manager
from ddp_hydra.cluster.kinds.local import Local, LocalCuda, Remote, Ssh
from ddp_hydra.cluster.kinds.services import Gateway, Kubernetes, Ray, Saturn, Slurm
from ddp_hydra.cluster.kinds.torchrun import Torchrun
from ddp_hydra.console.signals import held_back
from ddp_hydra.errors import ClusterError, DdpHydraError

log = logging.getLogger(__name__)
MANAGERS: dict[str, type[Manager]] = {
    "GatewayCluster": Gateway,
    "KubeCluster": Kubernetes,
    "LocalCUDACluster": LocalCuda,
    "LocalCluster": Local,
    "RayCluster": Ray,
    "Remote": Remote,
    "SLURMCluster": Slurm,
    "SSHCluster": Ssh,
    "SaturnCluster": Saturn,
    "Torchrun": Torchrun,
}
"""Managers of cluster classes that need one of their own, by the last part of `_target_`; others have `Manager`."""
POLL_S = 0.05
ANSWER_S = 5.0
"""Seconds that the scheduler may take to answer."""
STATUS_S = 5.0
"""The same for a cluster manager."""


def is_inline(cfg: DictConfig) -> bool:
    return bool(cfg.get("_target_") == f"{Inline.__module__}.{Inline.__name__}")


def is_remote(cfg: DictConfig) -> bool:
    return _manager_class(cfg) is Remote


def is_local(cfg: DictConfig) -> bool:
    """Return whether the workers will be threads or children of this process, in its environment."""
    return issubclass(_manager_class(cfg), Local)


def is_torchrun(cfg: DictConfig) -> bool:
    return _manager_class(cfg) is Torchrun


def _manager_class(cfg: DictConfig) -> type[Manager]:
    return MANAGERS.get(str(cfg.get("_target_", "")).rpartition(".")[2], Manager)


@contextmanager
def connect(cfg: DictConfig, logs: Path | None = None) -> Iterator[Any]:
    """Start a cluster, wait for its workers, and end it after the block; or use the existing one. Yield the client.

    Args:
        logs: folder for the output of workers, where that does not come here.
    """
    with ExitStack() as stack:
        yield start(cfg, stack, logs=logs) if _existing is None else stack.enter_context(_existing.client())


_existing: Scheduler | None = None


def use_existing(scheduler: Scheduler | None) -> None:
    """Have all jobs of this process use a cluster that already runs; None: each starts its own again."""
    global _existing
    _existing = scheduler


def has_existing() -> bool:
    return _existing is not None


def sweep() -> str:
    return _existing.sweep if _existing else ""


def expected_workers(cfg: DictConfig) -> int | None:
    """Return how many workers a job begins with at least, unless it is given a number of ranks; None: any number.

    As many were waited for when the cluster was connected to, but some may be lost while the job waits for others.
    """
    return cfg.get("n_workers") if _existing is None else _existing.expected


def start(
    cfg: DictConfig, stack: ExitStack, notify: Callable[[str], object] = log.info, logs: Path | None = None
) -> Any:
    """Start a cluster, and have `stack` end it; return its client."""
    manager = _manager_class(cfg)(cfg, logs)
    manager.check()
    if is_local(cfg):
        # The import of torch takes longer than the start of the workers, so it begins first and runs during that.
        with held_back():
            from ddp_hydra.rank import fork_client

        fork_client.hold()
        stack.callback(fork_client.release)
    load()
    stack.enter_context(dask.config.set(QUIET))
    # A scheduler of this process would log each call that a worker did not answer: the caller knows.
    stack.enter_context(without_messages("distributed.scheduler", "broadcast to "))
    try:
        cluster = stack.enter_context(manager.open())
        client = stack.enter_context(manager.client(cluster))
        manager.scale(cluster, (_states(client) or Counter())["running"])
    except DdpHydraError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Hydra and Dask wrap the first error
            cause = cause.__cause__
        raise ClusterError(manager.explain(cause)) from error
    wait_for_workers(client, manager, cluster)
    _arrange_end(manager, cluster, client, stack, notify)
    return client


def _arrange_end(
    manager: Manager, cluster: Any, client: Any, stack: ExitStack, notify: Callable[[str], object]
) -> None:
    if can_stay := hasattr(cluster, "shutdown_on_close"):
        cluster.shutdown_on_close = not manager.keep
    if manager.needs_idle_shutdown:
        from ddp_hydra.cluster import scheduler_plugin

        owner = None if manager.keep else client.id
        client.run_on_scheduler(BySource(scheduler_plugin.set_up), owner, manager.client_timeout_s)
    if manager.keep and (can_stay or manager.needs_idle_shutdown):
        name = getattr(cluster, "name", manager.name)
        notify(f"the cluster {name} is left running: the next job uses it with {manager.reuse_with(cluster)}")
    elif can_stay:
        stack.callback(_keep_for_other_jobs, cluster, client)


def _keep_for_other_jobs(cluster: Any, client: Any) -> None:
    from ddp_hydra.cluster import scheduler_plugin

    with suppress(OSError, TimeoutError):
        if jobs := client.run_on_scheduler(BySource(scheduler_plugin.count_other_jobs), client.id):
            log.warning("the cluster %s is kept for %d other jobs that run on it", cluster.name, jobs)
            cluster.shutdown_on_close = False


def wait_for_workers(client: Any, manager: Manager, cluster: Any) -> None:
    """Wait until as many workers as are expected run at the same time; those that pause or close do not count."""
    begin, is_asked, n_workers, timeout_s = time.monotonic(), False, manager.expected, manager.wait_timeout_s
    while True:
        states = _states(client)
        if states is not None and states["running"] >= n_workers:
            return
        if states is not None and not is_asked:
            from ddp_hydra.cluster import scheduler_plugin

            is_asked = True
            with suppress(OSError, TimeoutError):
                client.run_on_scheduler(BySource(scheduler_plugin.ask_for_workers), client.id, n_workers)
        if reason := manager.refusal(cluster):
            raise ClusterError(reason)
        if client.status == "closed" or time.monotonic() - begin > timeout_s:
            break
        time.sleep(POLL_S)
    waited_s = time.monotonic() - begin
    came = states["running"] if states else 0
    others = [f"{count} more {state}" for state, count in (states or {}).items() if state != "running"]
    reasons = ["the scheduler does not answer any more"] if states is None else []
    reasons += [*others, *filter(None, [_call_within(STATUS_S, lambda: manager.status(cluster))])]
    why = "; ".join(reasons) or manager.hint or "the logs of the cluster may say why"
    advice = f"cluster.n_workers={came or 1}, or cluster.wait_timeout_s={max(60, round(3 * timeout_s))}"
    raise ClusterError(f"{came} of {n_workers} workers came in {waited_s:.0f} s: {why}. Give {advice}")


def _states(client: Any) -> Counter[str] | None:
    """Count the workers by state; None if the scheduler does not answer."""
    try:  # `scheduler_info` would return its last answer, which may be old
        info = client.sync(client.scheduler.identity, n_workers=-1, callback_timeout=ANSWER_S)
    except (AttributeError, OSError, TimeoutError):
        return None
    return Counter(str(worker.get("status", "running")) for worker in info["workers"].values())


def _call_within(timeout_s: float, status: Callable[[], str]) -> str:
    answers: list[str] = []

    def call() -> None:
        try:
            answers.append(status())
        except Exception as error:  # it would only have added to the message
            answers.append(f"and the status of the cluster could not be read ({error!r:.200})")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else ""
