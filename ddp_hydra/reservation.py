"""Workers held for a gang, so that two jobs never share one.

The book is kept on the scheduler, whose event loop runs one function at a time: checking and taking is one
step. A holder is a client; the scheduler knows which clients are connected, so a dead one holds nothing. No lease
has to be renewed and no lock is left behind. The scheduler also tells a gang which of its workers are lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin

from ddp_hydra import placement
from ddp_hydra.errors import ClusterError

log = logging.getLogger(__name__)
POLL_S = 0.2
GROW_S = 10.0
"""How long a cluster that is too small may take to grow."""
LATE_S = 2.0


@contextmanager
def reserved(client: Client, gang: str, ranks: int | None, timeout_s: float) -> Iterator[dict[str, str]]:
    """Hold workers for a gang.

    Args:
        client: who holds them.
        gang: the gang's name.
        ranks: how many; None for all workers of the cluster.
        timeout_s: how long to wait for others to let go of theirs.

    Yields:
        Worker address -> host.

    Raises:
        ClusterError: not enough workers came free in time.
    """
    begin = time.monotonic()
    told = False
    while "workers" not in (answer := client.run_on_scheduler(take, gang, client.id, ranks)):
        waited_s = time.monotonic() - begin
        enough = answer["total"] >= answer["wanted"]
        if waited_s > (timeout_s if enough else min(timeout_s, GROW_S)):
            raise ClusterError(_too_few(enough=enough, waited_s=waited_s, **answer))
        if waited_s > 1 and not told:
            log.info("waiting for %(wanted)d workers: %(free)d of %(total)d are free", answer)
            told = True
        time.sleep(POLL_S)
    try:
        yield answer["workers"]
    finally:
        if client.status == "running":
            client.run_on_scheduler(give_back, gang)


def _too_few(wanted: int, free: int, total: int, enough: bool, waited_s: float) -> str:
    if not enough:
        return (
            f"dispatch.ranks={wanted}, but the cluster has {total} workers: give cluster.n_workers={wanted} or "
            f"dispatch.ranks={total}"
        )
    return (
        f"{wanted} workers were wanted, {free} of {total} are free after {waited_s:.0f} s: the rest are held by other "
        f"jobs. Give dispatch.ranks={max(1, free)} or less, add workers, or wait longer with dispatch.queue_timeout_s"
    )


def take(gang: str, holder: str, ranks: int | None, dask_scheduler: Any = None) -> dict[str, Any]:
    """Take workers where enough are free. Runs on the scheduler."""
    book = _book(dask_scheduler)
    for other, (client, _) in list(book.items()):
        if client not in dask_scheduler.clients:
            give_back(other, dask_scheduler)
    held = {address for _, addresses in book.values() for address in addresses}
    running = {
        address: worker.host for address, worker in dask_scheduler.workers.items() if worker.status.name == "running"
    }
    free = {address: host for address, host in running.items() if address not in held}
    wanted = ranks or max(1, len(running))
    if len(free) < wanted:
        return {"wanted": wanted, "free": len(free), "total": len(running)}
    chosen = placement.choose(free, wanted)
    book[gang] = (holder, list(chosen))
    return {"workers": chosen}


def give_back(gang: str, dask_scheduler: Any = None) -> None:
    """Let go of a gang's workers, and of the records that the scheduler still keeps of it."""
    _book(dask_scheduler).pop(gang, None)
    broker = getattr(dask_scheduler, "_broker", None)
    if broker is not None:
        broker._topics.pop(gang, None)
        # A last word of the client's, which goes another way than this call, may make the topic once more.
        dask_scheduler.loop.call_later(LATE_S, broker._topics.pop, gang, None)


class Guard(SchedulerPlugin):
    """Tells a gang, in its own topic, that a worker of its is lost, and takes back what a lost client held.

    Args:
        scheduler: of the cluster.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def log_event(self, topic: str, msg: Any) -> None:
        """Called by Dask when the client has been sent a record: the last thousand would stay in its memory."""
        if topic in _book(self.scheduler):
            self.scheduler._broker.truncate(topic)

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        """Called by Dask."""
        for gang, (_holder, addresses) in _book(scheduler).items():
            if worker in addresses:
                scheduler.log_event(gang, {"action": "remove-worker", "worker": worker})

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Called by Dask."""
        for gang, (holder, _) in list(_book(scheduler).items()):
            if holder == client:
                give_back(gang, scheduler)


def _book(scheduler: Any) -> dict[str, tuple[str, list[str]]]:
    if not hasattr(scheduler, "_ddp_hydra_book"):
        scheduler._ddp_hydra_book = {}
        scheduler.add_plugin(Guard(scheduler), name="ddp_hydra")
    return scheduler._ddp_hydra_book
