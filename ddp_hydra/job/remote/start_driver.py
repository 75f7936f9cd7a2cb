"""Describes a job to a driver; starts its process on a worker, and another one when a detached run's driver is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

import ddp_hydra
from ddp_hydra.config.project import Project
from ddp_hydra.job.loggers import LoggedJob
from ddp_hydra.rank.environment import without_dasks_limits

STDERR_BYTES = 2000
"""How much of stderr an error message contains."""


@dataclass(frozen=True)
class DriverSpec:
    """Describes a job to a driver. It is sent through Dask and a pipe, and never written to a disk.

    Args:
        name: the driver's name, which is also the topic of its messages.
        url: the URL of the results.
        config: the config as plain values.
        saved_config: the config as checkpoints contain it.
        overrides: the overrides it was composed with.
        project: the packed project space.
        hydra_files: the files that Hydra has saved of the job, by name.
        cwd: the folder where the command was typed.
        client: the id of the command's client at the scheduler; None: the run goes on without the command.
        sweep: the sweep that workers are reserved for.
        logged: the job as loggers see it.
        resume: the checkpoint to resume from, as the worker finds it; "" for none.
        goes_on: it may write where a run has left its results: it resumes that run, or is a job of a sweep.
        max_restarts: how many more drivers may follow, each when the one before is lost.
        is_restart: whether another driver has run this job before.
    """

    name: str
    url: str
    config: dict[str, Any]
    saved_config: dict[str, Any]
    overrides: tuple[str, ...]
    project: Project
    hydra_files: dict[str, bytes]
    cwd: str
    client: str | None
    sweep: str
    logged: LoggedJob
    resume: str = ""
    goes_on: bool = False
    max_restarts: int = 0
    is_restart: bool = False


async def start(spec: DriverSpec, dask_worker: Any = None) -> dict[str, Any]:
    """Start a driver, and wait until it answers. Runs on a worker, called by the client or the supervisor.

    The driver outlives this worker, which Dask may restart at any time, but not the scheduler.

    Returns:
        `error`, a message; or `client`, the id of its client at the scheduler, and its `pid`.
    """
    place = dask_worker.scheduler.address, dask_worker.security, str(Path(dask_worker.local_directory).parent)
    return await asyncio.to_thread(_start, pickle.dumps((spec, *place)))


def _start(pickled: bytes) -> dict[str, Any]:
    environment = without_dasks_limits(os.environ)
    path = [str(Path(ddp_hydra.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", "ddp_hydra.job.remote.driver"],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    # The thread waits for the process, so that it does not stay as a zombie.
    threading.Thread(target=process.wait, daemon=True, name=f"driver {process.pid}").start()
    with process.stdout, process.stderr:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(pickled)
        answer = process.stdout.readline()
        errors = b"" if answer else process.stderr.read()[-STDERR_BYTES:]
    try:
        return dict(json.loads(answer))
    except ValueError:
        return {"error": f"the driver could not be started: {errors.decode(errors='replace').strip()}"}


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
        for _ in range(TRIES):
            workers = [address for address, worker in self.scheduler.workers.items() if worker.status.name == "running"]
            if workers:
                call = {
                    "op": "run",
                    "function": dumps(start),
                    "args": dumps((spec,)),
                    "kwargs": dumps({}),
                }
                chosen = [random.choice(workers)]  # noqa: S311
                answers = await self.scheduler.broadcast(msg={**call, "wait": True}, workers=chosen, on_error="ignore")
                if any(answer["status"] == "OK" and "error" not in answer["result"] for answer in answers.values()):
                    return
            await asyncio.sleep(PAUSE_S)
        log.warning("the driver of %s is lost, and no worker could start another", spec.url)


def supervise(client: str, spec: DriverSpec | None, dask_scheduler: Any = None) -> None:
    """Restart a driver if its client disconnects; with None, no more: it has done its job. Runs on the scheduler."""
    if NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(DriverSupervisor(dask_scheduler), name=NAME)
    specs = dask_scheduler.plugins[NAME].specs
    if spec is None:
        specs.pop(client, None)
    else:
        specs[client] = spec
