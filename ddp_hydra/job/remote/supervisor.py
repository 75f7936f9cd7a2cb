"""A driver that nobody waits for, and that is lost with its host, is started again elsewhere: by the scheduler."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import replace
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from ddp_hydra.job.remote import start_driver
from ddp_hydra.job.remote.job_spec import JobSpec
from ddp_hydra.job.remote.status import BEAT_S, ENDED, LOST, read
from ddp_hydra.storage.results_root import Store

NAME = "ddp_hydra-keeper"
TRIES = 10
PAUSE_S = 5.0

log = logging.getLogger("distributed.ddp_hydra")


class Keeper(SchedulerPlugin):
    """Knows the drivers that shall not be lost, and starts them again.

    Args:
        scheduler: of the cluster.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.orders: dict[str, JobSpec] = {}

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Called by Dask."""
        order = self.orders.pop(client, None)
        if order is not None and order.lives > 0:
            scheduler.loop.add_callback(self.again, replace(order, lives=order.lives - 1, again=True))

    async def again(self, order: JobSpec) -> None:
        """Have some worker start another driver."""
        for _ in range(TRIES):
            workers = [address for address, worker in self.scheduler.workers.items() if worker.status.name == "running"]
            if workers:
                call = {
                    "op": "run",
                    "function": dumps(start_driver.start),
                    "args": dumps((order,)),
                    "kwargs": dumps({}),
                }
                chosen = [random.choice(workers)]  # noqa: S311
                answers = await self.scheduler.broadcast(msg={**call, "wait": True}, workers=chosen, on_error="ignore")
                if any(answer["status"] == "OK" and "error" not in answer["result"] for answer in answers.values()):
                    return
            await asyncio.sleep(PAUSE_S)
        log.warning("the driver of %s is lost, and no worker could start another", order.url)


def keep(client: str, order: JobSpec, dask_scheduler: Any = None) -> None:
    """Start a driver again when it leaves without a word. Runs on the scheduler.

    Args:
        client: its id.
        order: what it was told.
        dask_scheduler: given by Dask.
    """
    if NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(Keeper(dask_scheduler), name=NAME)
    dask_scheduler.plugins[NAME].orders[client] = order


def let_go(client: str, dask_scheduler: Any = None) -> None:
    """A driver has come to its end. Runs on the scheduler."""
    if NAME in dask_scheduler.plugins:
        dask_scheduler.plugins[NAME].orders.pop(client, None)


def is_over(there: Store, silence_s: float) -> bool:
    """Wait until the driver before us says nothing any more: it may only have lost the scheduler.

    Args:
        there: the run's folder in its store.
        silence_s: how long it has to be silent.

    Returns:
        Whether the run has ended, and needs no other driver.
    """
    before: Any = None
    heard = time.monotonic()
    while time.monotonic() - heard < max(silence_s, 2.5 * BEAT_S):
        status = read(there)
        if status.get("state") in ENDED:
            return True
        if status.get("state") == LOST:
            return False
        if status.get("time") != before:
            before, heard = status.get("time"), time.monotonic()
        time.sleep(BEAT_S / 4)
    return False
