"""Restarts the driver of a detached run on another worker when it is lost. The supervisor lives on the scheduler."""

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
from ddp_hydra.job.remote.start_driver import DriverSpec
from ddp_hydra.job.remote.status import ENDED, HEARTBEAT_S, LOST, read
from ddp_hydra.storage.base import Store

NAME = "ddp_hydra-supervisor"
TRIES = 10
PAUSE_S = 5.0

log = logging.getLogger("distributed.ddp_hydra")


class DriverSupervisor(SchedulerPlugin):
    """Starts another driver when a supervised one disconnects.

    Args:
        scheduler: of the cluster.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.specs: dict[str, DriverSpec] = {}

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Restart the driver whose client has disconnected. Called by Dask."""
        spec = self.specs.pop(client, None)
        if spec is not None and spec.max_restarts > 0:
            remaining = replace(spec, max_restarts=spec.max_restarts - 1, is_restart=True)
            scheduler.loop.add_callback(self.restart_driver, remaining)

    async def restart_driver(self, spec: DriverSpec) -> None:
        """Start another driver on any worker."""
        for _ in range(TRIES):
            workers = [address for address, worker in self.scheduler.workers.items() if worker.status.name == "running"]
            if workers:
                call = {
                    "op": "run",
                    "function": dumps(start_driver.start),
                    "args": dumps((spec,)),
                    "kwargs": dumps({}),
                }
                chosen = [random.choice(workers)]  # noqa: S311
                answers = await self.scheduler.broadcast(msg={**call, "wait": True}, workers=chosen, on_error="ignore")
                if any(answer["status"] == "OK" and "error" not in answer["result"] for answer in answers.values()):
                    return
            await asyncio.sleep(PAUSE_S)
        log.warning("the driver of %s is lost, and no worker could start another", spec.url)


def supervise(client: str, spec: DriverSpec, dask_scheduler: Any = None) -> None:
    """Restart a driver if it disconnects before it is released. Runs on the scheduler.

    Args:
        client: the id of the driver's client.
        spec: the driver's job.
        dask_scheduler: given by Dask.
    """
    if NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(DriverSupervisor(dask_scheduler), name=NAME)
    dask_scheduler.plugins[NAME].specs[client] = spec


def release(client: str, dask_scheduler: Any = None) -> None:
    """End the supervision of a driver that has done its job. Runs on the scheduler."""
    if NAME in dask_scheduler.plugins:
        dask_scheduler.plugins[NAME].specs.pop(client, None)


def has_ended(store: Store, silence_s: float) -> bool:
    """Return whether a run has ended and needs no other driver.

    The previous driver may only have lost the scheduler, so this waits until it has been silent for a while.

    Args:
        store: the run's folder.
        silence_s: how long it has to be silent, in seconds.
    """
    last_update: float | None = None
    updated = time.monotonic()
    while time.monotonic() - updated < max(silence_s, 2.5 * HEARTBEAT_S):
        status = read(store)
        state, at = (None, None) if status is None else (status.state, status.time)
        if state in ENDED:
            return True
        if state == LOST:
            return False
        if at != last_update:
            last_update, updated = at, time.monotonic()
        time.sleep(HEARTBEAT_S / 4)
    return False
