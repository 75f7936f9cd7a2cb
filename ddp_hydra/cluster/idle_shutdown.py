"""Ends a cluster that costs money when the client that started it was killed.

A callback on the scheduler looks every few seconds. Nothing happens while that client is connected or a job runs. The
module is sent to the scheduler as text, see `by_source.py`, so it imports no ddp_hydra.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from tornado.ioloop import PeriodicCallback

log = logging.getLogger(__name__)
NAME = "ddp_hydra-idle-shutdown"


def set_up(client: str | None, timeout_s: float, dask_scheduler: Any = None) -> None:
    """Have the cluster end when a client has been away for too long. Runs on the scheduler.

    Args:
        client: its id; None to keep the cluster running.
        timeout_s: how long it may be away, for a broken connection may come back.
        dask_scheduler: passed by Dask.
    """
    before = dask_scheduler.periodic_callbacks.pop(NAME, None)
    if before is not None:
        before.stop()
    if client is not None:
        check = IdleShutdown(dask_scheduler, client, timeout_s).check
        callback = PeriodicCallback(check, 1000 * min(5.0, timeout_s / 4))
        dask_scheduler.periodic_callbacks[NAME] = callback
        callback.start()


def count_other_jobs(client: str, dask_scheduler: Any = None) -> int:
    """Return how many gangs of other clients run. Runs on the scheduler."""
    return sum(holder != client for holder in holders(dask_scheduler))


def holders(scheduler: Any) -> list[str]:
    """Return the clients that hold workers, once for each gang; see `scheduler_plugin.py`."""
    reservations = getattr(scheduler, "_ddp_hydra_reservations", {})
    return [entry["holder"] for entry in reservations.values() if entry["holder"] in scheduler.clients]


class IdleShutdown:
    """Ends the cluster when a client is away and nobody uses the workers.

    Args:
        scheduler: of the cluster.
        client: its id.
        timeout_s: how long it may be away.
    """

    def __init__(self, scheduler: Any, client: str, timeout_s: float) -> None:
        self.scheduler, self.client, self.timeout_s = scheduler, client, timeout_s
        self.seen = time.monotonic()
        self.is_over = False

    async def check(self) -> None:
        """End the cluster if it is time to; called every few seconds."""
        if self.client in self.scheduler.clients or holders(self.scheduler):
            self.seen = time.monotonic()
        elif time.monotonic() - self.seen > self.timeout_s and not self.is_over:
            self.is_over = True
            log.warning("the client that started this cluster has been gone for %g s: it ends now", self.timeout_s)
            await end(self.scheduler)


async def end(scheduler: Any) -> None:
    """End the cluster of a scheduler from inside."""
    for plugin in list(scheduler.plugins.values()):
        gateway = getattr(getattr(plugin, "service", None), "gateway", None)
        if gateway is not None:  # dask-gateway's own way also ends machines that have not connected yet
            await gateway.shutdown()
            return
    await scheduler.close(reason="its client is gone")
