"""Clusters of hosts that are reached by ssh."""

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

    required_packages = ("asyncssh",)

    def check(self) -> None:
        """Check the hosts, and count the workers that they make."""
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
        """Start the cluster, and keep the last lines that come over ssh."""
        self.last_lines = LastLines()
        logger = logging.getLogger("distributed.deploy.ssh")
        level, propagate = logger.level, logger.propagate
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self.last_lines)
        try:
            # Dask reads from these log lines whether a process has started.
            with dask.config.set({"logging.distributed": "info"}):
                cluster = super().open()
        finally:
            logger.removeHandler(self.last_lines)
            logger.setLevel(level)
            logger.propagate = propagate
        for process in (cluster.scheduler, *cluster.workers.values()):
            for stream in (process.proc.stdout, process.proc.stderr):
                cluster.loop.add_callback(self.last_lines.read, stream)
        return cluster

    def scale(self, cluster: Any, workers: int) -> None:
        """Do nothing: the list of hosts determines the number of workers."""

    def status(self, cluster: Any) -> str:
        """Repeat the last lines that came over ssh."""
        return f"the hosts said: {' | '.join(self.last_lines.lines)}" if self.last_lines.lines else ""

    def explain(self, error: BaseException) -> str:
        """Add the last lines that came over ssh, and what can be wrong there."""
        reason = super().explain(error)
        output = f". It said: {' | '.join(self.last_lines.lines)}" if self.last_lines.lines else ""
        return (
            f"{reason}{output}. `ssh <host>` has to work without a password (keys and users: cluster.connect_options), "
            "and cluster.remote_python has to be a Python with ddp_hydra on every host"
        )


class LastLines(logging.Handler):
    """Keeps the last lines of a log, and of processes' output."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a log record's message."""
        self.add(record.getMessage())

    def add(self, line: str) -> None:
        """Keep a line."""
        self.lines = [*self.lines, line.strip()][-KEPT_LINES:]

    async def read(self, stream: Any) -> None:
        """Read a process's output to its end: a process whose output nobody reads blocks at some time."""
        with suppress(OSError):
            async for line in stream:
                self.add(line)
