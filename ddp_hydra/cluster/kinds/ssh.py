"""Clusters of hosts that one can log in to."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import dask

from ddp_hydra.cluster.kinds.base import Manager
from ddp_hydra.errors import ClusterError

KEPT_LINES = 5


class Ssh(Manager):
    """`distributed.SSHCluster`: the scheduler on the first of `hosts`, workers on the others."""

    needs = ("asyncssh",)

    def check(self) -> None:
        """Count the hosts."""
        super().check()
        hosts = self.arguments.get("hosts")
        if not isinstance(hosts, list) or len(hosts) < 2:
            raise ClusterError(
                f"cluster.hosts={hosts}: give at least two, [a,a,b]: the first one gets the scheduler, each other one "
                "a worker; a host may be named more than once"
            )
        each = (self.arguments.get("worker_options") or {}).get("n_workers", 1)
        there = each * (len(hosts) - 1)
        if self.n_workers not in (None, there):
            raise ClusterError(
                f"cluster.n_workers={self.n_workers}, but cluster.hosts={hosts} make {there} workers: leave n_workers "
                "out, and name a host as often as it shall have workers"
            )
        self.n_workers = there

    def open(self) -> Any:
        """Start it, and remember what comes over ssh meanwhile."""
        self.heard = Heard()
        logger = logging.getLogger("distributed.deploy.ssh")
        level, propagate = logger.level, logger.propagate
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self.heard)
        try:
            # Whether a process is up is read from what it logs.
            with dask.config.set({"logging.distributed": "info"}):
                cluster = super().open()
        finally:
            logger.removeHandler(self.heard)
            logger.setLevel(level)
            logger.propagate = propagate
        for process in (cluster.scheduler, *cluster.workers.values()):
            for stream in (process.proc.stdout, process.proc.stderr):
                cluster.loop.add_callback(self.heard.read_on, stream)
        return cluster

    def size(self, cluster: Any, workers: int) -> None:
        """The hosts say how many there are."""

    def ask(self, cluster: Any) -> str:
        """Say what came over ssh."""
        return f"the hosts said: {' | '.join(self.heard.lines)}" if self.heard.lines else ""

    def explain(self, error: BaseException) -> str:
        """Say what came over ssh, and what can be wrong there."""
        said = super().explain(error)
        heard = f". It said: {' | '.join(self.heard.lines)}" if self.heard.lines else ""
        return (
            f"{said}{heard}. `ssh <host>` has to work without a password (keys and users: cluster.connect_options), "
            "and cluster.remote_python has to be a Python with ddp_hydra on every host"
        )


class Heard(logging.Handler):
    """Keeps the last lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        self.hear(record.getMessage())

    def hear(self, line: str) -> None:
        """Keep a line."""
        self.lines = [*self.lines, line.strip()][-KEPT_LINES:]

    async def read_on(self, stream: Any) -> None:
        """Read what nobody else reads: a process whose output is not read would stop one day."""
        with suppress(OSError):
            async for line in stream:
                self.hear(line)
