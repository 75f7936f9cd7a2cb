"""Clusters whose workers this machine starts, itself or by ssh, and clusters that run already."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import dask

from ddp_hydra.cluster.connection import (
    GIVE,
    POLL_S,
    Scheduler,
    await_scheduler,
    check_certificates,
    load,
    without_messages,
)
from ddp_hydra.cluster.kinds import Manager
from ddp_hydra.console.signals import held_back
from ddp_hydra.errors import ClusterError
from ddp_hydra.rank import environment


class Local(Manager):
    """`distributed.LocalCluster`: a scheduler in this process, and workers in threads of it or in processes."""

    needs_idle_shutdown = False

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """Start the cluster from a thread in which signals are blocked, so that only this process receives Ctrl-C."""
        from distributed.utils import LoopRunner

        runner = LoopRunner()
        with held_back():
            resource_tracker.ensure_running()  # otherwise one of Dask's threads starts it, and it receives signals
            runner.start()
        self.arguments["loop"] = runner.loop
        if not self.arguments.get("processes", True):
            # Addresses of workers in one process are made up, unless a protocol is given; ranks need a real host.
            protocol = "tls://" if self.arguments.get("security") else "tcp://"
            self.arguments.setdefault("protocol", protocol)
        with contextlib.ExitStack() as closing:
            try:
                with _killed_by_interrupt(runner.loop):
                    cluster = super().open()
                try:
                    yield cluster
                finally:
                    # The job is over, and nothing is lost where nannies kill slow workers, or Ctrl-C cancels this.
                    closing.enter_context(without_messages("distributed.nanny", "Worker process still alive"))
                    closing.enter_context(without_messages("distributed.worker", ""))
                    with _killed_by_interrupt(runner.loop):
                        cluster.close()
            finally:
                runner.stop()

    def status(self, cluster: Any) -> str:
        dead = [name for name, nanny in cluster.workers.items() if getattr(nanny, "pid", 1) is None]
        return f"the processes of workers {', '.join(map(str, dead))} have ended" if dead else ""


class LocalCuda(Local):
    """`dask_cuda.LocalCUDACluster`: one worker for each GPU; the GPU is cuda:0 of its rank."""

    def check(self) -> None:
        given = self.arguments.get("CUDA_VISIBLE_DEVICES")
        if isinstance(given, int):  # Hydra makes a number of 1
            given = self.arguments["CUDA_VISIBLE_DEVICES"] = [given]
        names = ",".join(map(str, given)) if isinstance(given, list) else given
        names = os.environ.get("CUDA_VISIBLE_DEVICES") if names is None else names
        visible = None if names is None else environment.visible_gpus({"CUDA_VISIBLE_DEVICES": names})
        there = len(environment.gpu_uuids() if visible is None else visible)
        if not there:
            raise ClusterError(
                "cluster=local_cuda: no GPU here: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or give cluster=local"
            )
        if self.n_workers is not None and self.n_workers > there:
            raise ClusterError(
                f"cluster.n_workers={self.n_workers}, and there are {there} GPUs here: give less, or null for all"
            )
        super().check()
        self.n_workers = self.n_workers or there


@contextlib.contextmanager
def _killed_by_interrupt(loop: Any) -> Iterator[None]:
    """Kill the workers at Ctrl-C. Dask itself fails slowly when it closes a cluster that half starts or half ends."""
    from distributed.deploy.spec import SpecCluster

    try:
        yield
        return
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for cluster in [cluster for cluster in SpecCluster._instances if cluster.loop is loop]:
            SpecCluster._instances.discard(cluster)  # Dask closes what is in it when Python ends
            cluster._loop_runner.stop()
            for pid in filter(None, (getattr(worker, "pid", None) for worker in cluster._created)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    finally:
        logging.disable(before)
    raise interrupted


KEPT_LINES = 5


class Ssh(Manager):
    """`distributed.SSHCluster`: the scheduler on the first of `hosts`, workers on the others."""

    required_packages = ("asyncssh",)

    def check(self) -> None:
        super().check()
        hosts = self.arguments.get("hosts")
        if not isinstance(hosts, list) or len(hosts) < 2:
            raise ClusterError(
                f"cluster.hosts={hosts}: give two or more, [a,a,b]: the first gets the scheduler, the others workers"
            )
        each = (self.arguments.get("worker_options") or {}).get("n_workers", 1)
        there = each * (len(hosts) - 1)
        if self.n_workers not in (None, there):
            raise ClusterError(
                f"cluster.n_workers={self.n_workers}: cluster.hosts={hosts} make {there} workers: leave it out"
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
        return f"the hosts said: {' | '.join(self.last_lines.lines)}" if self.last_lines.lines else ""

    def explain(self, error: BaseException) -> str:
        reason = super().explain(error)
        output = f". It said: {' | '.join(self.last_lines.lines)}" if self.last_lines.lines else ""
        advice = (
            "`ssh <host>` has to work without a password, and cluster.remote_python to have ddp_hydra on every host"
        )
        return f"{reason}{output}. {advice}"


class LastLines(logging.Handler):
    """Keeps the last lines of a log, and of processes' output."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.add(record.getMessage())

    def add(self, line: str) -> None:
        self.lines = [*self.lines, line.strip()][-KEPT_LINES:]

    async def read(self, stream: Any) -> None:
        """Read a process's output to its end: a process whose output nobody reads blocks at some time."""
        with suppress(OSError):
            async for line in stream:
                self.add(line)


CONNECT_S = 10.0
"""Seconds that the scheduler may take to answer, and its file to appear."""


class Remote(Manager):
    """`cluster=remote`: a scheduler that was started by somebody else, and that stays after the job."""

    needs_idle_shutdown = False
    can_keep = True
    keys = ("address", "scheduler_file", "security")

    def check(self) -> None:
        super().check()
        if unknown := [key for key in self.arguments if key not in self.keys]:
            raise ClusterError(f"cluster.{unknown[0]}: cluster=remote takes {', '.join(self.keys)}")
        if bool(self.arguments.get("address")) == bool(self.arguments.get("scheduler_file")):
            raise ClusterError(
                "cluster=remote: give cluster.address=tcp://<host>:8786, or cluster.scheduler_file=<file>"
            )

    def open(self) -> Any:
        return contextlib.nullcontext()

    def client(self, cluster: Any) -> Any:
        load()
        address = self.arguments.get("address") or read_address(Path(self.arguments["scheduler_file"]))
        security = make_security(self.arguments.get("security"))
        if address.startswith("tls://"):
            check_certificates(security)
        await_scheduler(address, security, CONNECT_S)
        return Scheduler(address, security, timeout_s=CONNECT_S).client()


def make_security(given: Mapping[str, Any] | None) -> Any:
    from distributed import Security

    values = {key: value for key, value in (given or {}).items() if value is not None}
    try:
        return Security(**({"require_encryption": True, **values} if values else {}))
    except (TypeError, ValueError) as error:  # without the values: a private key may be among them
        raise ClusterError(f"cluster.security: {error}: give {GIVE}, or what else distributed.Security takes") from None


def read_address(file: Path) -> str:
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return str(json.loads(file.read_text())["address"])
        except (OSError, KeyError, TypeError, ValueError):
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"cluster.scheduler_file={file}: `dask scheduler --scheduler-file` has not written it"
                ) from None
        time.sleep(POLL_S)
