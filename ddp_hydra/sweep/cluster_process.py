"""A cluster in a process of its own, for all jobs of a sweep; it is taken down also when the sweep is killed."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dask
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connect import Scheduler
from ddp_hydra.errors import ClusterError, DdpHydraError
from ddp_hydra.sweep.forked_process import Child

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""How often is looked how many workers there are."""
CLOSE_S = 30.0
"""How long the cluster may take to close."""


class ClusterHost:
    """A cluster that is coming up, up, or gone.

    Args:
        config: of the cluster.
        sweep: on whose behalf its workers are reserved.
        output: the file that gets what the cluster prints.
        not_its: descriptors of ours that its process closes.
    """

    def __init__(self, config: str, sweep: str, output: Path, not_its: Sequence[int] = ()) -> None:
        self.config, self.output = config, output
        self.child = Child(
            partial(serve, config, sweep, output.parent / "logs", os.getpid()), output, not_its, survives=True
        )
        self.scheduler: Scheduler | None = None
        self.workers = 0
        self.is_gone = False

    def look(self) -> None:
        """Hear whether it is up, and how many workers there are.

        Raises:
            ClusterError: it did not come up.
        """
        alive = self.child.hear()
        for kind, value in self.child.values:
            if kind == "up":
                self.scheduler = value
            elif kind == "workers":
                self.workers = value
            elif kind == "says":
                log.info(value)
            else:
                raise ClusterError(value)
        self.child.values.clear()
        if not alive and not self.is_gone:
            self.is_gone = True
            if self.scheduler is None:
                raise ClusterError(f"the process of the cluster {self.child.how_it_ended()}: see {self.output}")

    def close(self) -> None:
        """Take it down."""
        self.child.end(CLOSE_S)


def serve(config: str, sweep: str, logs: Path, parent: int, pipe: Connection) -> tuple[str, Any]:
    """Bring up a cluster and keep it until the sweep's process wants it no more, or is gone."""
    # Dask's workers would import the program's own file anew, and it may not be written for that.
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with ExitStack() as stack:
            parsed = OmegaConf.create(config)
            assert isinstance(parsed, DictConfig)
            # A LocalCluster's workers are forked from one process that has imported Dask, not spawned one by one. That
            # takes a process of our own: its environment is theirs, and killed, it would leave a folder behind.
            if connect.is_local(parsed):
                stack.enter_context(dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}))
            client = connect.start(parsed, stack, lambda said: pipe.send(("says", said)), logs)
            workers = _workers(client)
            pipe.send(("workers", workers))
            pipe.send(("up", Scheduler(client.scheduler.address, client.security, sweep)))
            while os.getppid() == parent and not pipe.poll(LOOK_S):
                if workers != (workers := _workers(client)):
                    pipe.send(("workers", workers))
    except KeyboardInterrupt:
        return "workers", 0
    except DdpHydraError as error:
        return "failed", str(error)
    return "workers", 0


def _workers(client: Any) -> int:
    return len(client.scheduler_info(n_workers=-1)["workers"])
