"""Ends a cluster that costs money when the client that started it was killed.

The watch sits on the scheduler, beside the book of who holds which workers: as long as that client is there, or any
job is at work, nothing happens. It is sent there as text, see `shipped.py`, so it imports no ddp_hydra.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from tornado.ioloop import PeriodicCallback

log = logging.getLogger(__name__)
NAME = "ddp_hydra-lease"


def take(client: str | None, timeout_s: float, dask_scheduler: Any = None) -> None:
    """Have the cluster end when a client is gone for so long. Runs on the scheduler.

    Args:
        client: its id; None to let the cluster live on.
        timeout_s: for a connection that breaks may come back.
        dask_scheduler: given by Dask.
    """
    before = dask_scheduler.periodic_callbacks.pop(NAME, None)
    if before is not None:
        before.stop()
    if client is not None:
        watch = PeriodicCallback(Lease(dask_scheduler, client, timeout_s).look, 1000 * min(5.0, timeout_s / 4))
        dask_scheduler.periodic_callbacks[NAME] = watch
        watch.start()


def others(client: str, dask_scheduler: Any = None) -> int:
    """How many jobs of others are at work. Runs on the scheduler."""
    return sum(holder != client for holder in holders(dask_scheduler))


def holders(scheduler: Any) -> list[str]:
    """The clients that hold workers, once for each gang; see `book.py`."""
    book = getattr(scheduler, "_ddp_hydra_book", {})
    return [entry["holder"] for entry in book.values() if entry["holder"] in scheduler.clients]


class Lease:
    """Watches a client.

    Args:
        scheduler: of the cluster.
        client: its id.
        timeout_s: how long it may be away.
    """

    def __init__(self, scheduler: Any, client: str, timeout_s: float) -> None:
        self.scheduler, self.client, self.timeout_s = scheduler, client, timeout_s
        self.seen = time.monotonic()
        self.is_over = False

    async def look(self) -> None:
        """Called every few seconds."""
        if self.client in self.scheduler.clients or holders(self.scheduler):
            self.seen = time.monotonic()
        elif time.monotonic() - self.seen > self.timeout_s and not self.is_over:
            self.is_over = True
            log.warning("the client that started this cluster is gone for %g s: the cluster ends", self.timeout_s)
            await end(self.scheduler)


async def end(scheduler: Any) -> None:
    """End a cluster from inside."""
    for plugin in list(scheduler.plugins.values()):
        gateway = getattr(getattr(plugin, "service", None), "gateway", None)
        if gateway is not None:  # dask-gateway's own, which ends machines that have not connected yet, too
            await gateway.shutdown()
            return
    await scheduler.close(reason="its client is gone")
