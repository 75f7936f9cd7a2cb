"""Runs a cluster for all jobs of a sweep in a process of its own, which also ends it if the sweep is killed."""

from __future__ import annotations

import logging
import os
import sys
import types
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dask
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import Scheduler
from ddp_hydra.errors import ClusterError, DdpHydraError
from ddp_hydra.sweep.forked_process import ForkedProcess

log = logging.getLogger(__name__)
POLL_S = 1.0
"""How often the workers are counted."""
SHORT_LOGS = {
    "distributed.scheduler.events-cleanup-delay": "10s",  # the events of a client that has left; an hour otherwise
    "distributed.admin.low-level-log-length": 100,  # messages; of 1,000, each may start a rank and hold the project
}
"""What lets the memory of the scheduler grow with each job of a sweep."""
CLOSE_S = 30.0
"""How long the cluster may take to close."""


class ClusterProcess:
    """Starts a cluster in a process.

    Args:
        config: of the cluster, as YAML.
        sweep: the sweep that workers are reserved for.
        output: the file that gets the cluster's output.

    Attributes:
        scheduler: None until the cluster is up.
        workers: number of workers.
        is_gone: whether the process has ended.
    """

    def __init__(self, config: str, sweep: str, output: Path) -> None:
        self.config, self.output = config, output
        work = partial(serve, config, sweep, output.parent / "logs", os.getpid())
        self.process = ForkedProcess(work, output, watches_parent=True)
        self.scheduler: Scheduler | None = None
        self.workers = 0
        self.is_gone = False

    def update(self) -> None:
        """Receive the cluster's messages.

        Raises:
            ClusterError: it did not come up.
        """
        is_alive = self.process.receive()
        for kind, value in self.process.messages:
            if kind == "up":
                self.scheduler = value
            elif kind == "workers":
                self.workers = value
            elif kind == "log":
                log.info(value)
            else:
                raise ClusterError(value)
        self.process.messages.clear()
        if not is_alive and not self.is_gone:
            self.is_gone = True
            if self.scheduler is None:
                raise ClusterError(f"the process of the cluster {self.process.describe_end()}: see {self.output}")

    def close(self) -> None:
        """End the cluster."""
        self.process.end(CLOSE_S)


def serve(config: str, sweep: str, logs: Path, parent: int, pipe: Connection) -> tuple[str, Any]:
    """Bring up a cluster, and keep it until the sweep's process sends a message or ends. Runs in the forked process."""
    # Dask's workers would import the program's own file again, which may do more than define things.
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with ExitStack() as stack:
            parsed = OmegaConf.create(config)
            assert isinstance(parsed, DictConfig)
            # A LocalCluster's workers are forked from one process that has imported Dask, instead of spawned one by
            # one. That process has to be ours, because they inherit its environment.
            if connect.is_local(parsed):
                stack.enter_context(dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}))
            stack.enter_context(dask.config.set(SHORT_LOGS))
            client = connect.start(parsed, stack, lambda line: pipe.send(("log", line)), logs)
            workers = _count_workers(client)
            pipe.send(("workers", workers))
            pipe.send(("up", Scheduler(client.scheduler.address, client.security, sweep)))
            while os.getppid() == parent and not pipe.poll(POLL_S):
                if workers != (workers := _count_workers(client)):
                    pipe.send(("workers", workers))
    except KeyboardInterrupt:
        return "workers", 0
    except DdpHydraError as error:
        return "failed", str(error)
    return "workers", 0


def _count_workers(client: Any) -> int:
    return len(client.scheduler_info(n_workers=-1)["workers"])
