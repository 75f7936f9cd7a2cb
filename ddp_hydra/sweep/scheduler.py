"""Decides which job of a sweep starts next, and on which cluster; runs that cluster in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dask
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import Scheduler, workers_of
from ddp_hydra.errors import ClusterError, DdpHydraError
from ddp_hydra.sweep.forked_process import ForkedProcess
from ddp_hydra.sweep.planned_job import JobOutcome, PlannedJob
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import JobRow, JobState

log = logging.getLogger(__name__)
STOP_S = 10.0
"""How long a job that has exceeded its time limit may take to end."""


@dataclass
class RunningJob:
    """A job that has started.

    Args:
        planned: the job.
        process: its process.
        begun: when it got its workers, by the monotonic clock.
        stop_reason: the reason why it alone was told to stop.
        kill_at: when it is killed, by the monotonic clock.
    """

    planned: PlannedJob
    process: ForkedProcess
    begun: float = field(default_factory=time.monotonic)
    stop_reason: str = ""
    kill_at: float | None = None

    @property
    def row(self) -> JobRow:
        return self.planned.row

    @property
    def wall_s(self) -> float:
        """Return how long it has taken, with the earlier runs that it resumes, in seconds."""
        return self.planned.spent_s + time.monotonic() - self.begun

    def outcome(self, is_interrupted: bool) -> JobOutcome:
        last = self.process.messages[-1] if self.process.messages else None
        self.process.end()
        if isinstance(last, JobOutcome):
            outcome = last
        else:
            log_file = self.planned.folder / "logs" / "job.log"
            message = f"its own process {self.process.describe_end()}; see {log_file}"
            outcome = JobOutcome(JobState.interrupted if is_interrupted else JobState.failed, None, message)
        if self.stop_reason and outcome.state != JobState.done:
            return JobOutcome(JobState.failed, None, self.stop_reason)
        return outcome

    def check_time(self, limit_s: float | None, now: float) -> None:
        if limit_s is not None and now - self.begun > limit_s and not self.stop_reason:
            self.stop_reason = f"it took longer than hydra.launcher.job_timeout_s={limit_s:g}"
            self.kill_at = now + STOP_S
            self.process.signal(signal.SIGINT)
        if self.kill_at is not None and now > self.kill_at:
            self.process.signal(signal.SIGKILL)


class JobScheduler:
    """Fills the workers of a cluster with jobs.

    One cluster is up at a time, so that no cluster slows down the jobs on another. Jobs that need another one wait.

    Args:
        queue: the jobs that have not started.
        max_jobs: how many may run at once; None for as many as fit.
        start_cluster: starts the cluster of a config.

    Attributes:
        cluster: the cluster that is up, if any.
        running: the jobs that have started; the sweep adds and removes them.
    """

    def __init__(self, queue: JobQueue, max_jobs: int | None, start_cluster: Callable[[str], ClusterProcess]) -> None:
        self.queue, self.max_jobs, self.start_cluster = queue, max_jobs, start_cluster
        self.cluster: ClusterProcess | None = None
        self.running: list[RunningJob] = []

    def bring_up(self, config: str) -> None:
        if self.cluster is not None and (self.cluster.config != config or self.cluster.is_gone):
            self.close_cluster()
        if self.cluster is None and config:
            self.cluster = self.start_cluster(config)

    def close_cluster(self) -> None:
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            cluster.close()

    def ready_jobs(self, is_stopping: Callable[[], bool]) -> Iterator[PlannedJob]:
        """Yield the jobs to start now, taken from the queue. If a cluster cannot be brought up, all its jobs fail."""
        try:
            job = self._next_job()
            if not self.running and (job := job or self.queue.first(None)) is not None:
                self.bring_up(job.need.cluster)
            if self.cluster is not None:
                self.cluster.update()
                if self.cluster.is_gone and job is not None:
                    log.warning("the cluster is gone: another one is brought up")
                    self.bring_up(self.cluster.config)
            while job is not None and not is_stopping() and self.fits(job):
                self.queue.remove(job)
                yield job
                job = self._next_job()
        except ClusterError as error:
            config = self.cluster.config if self.cluster else ""
            self.close_cluster()
            self.queue.fail_all_on(config, error)

    def _next_job(self) -> PlannedJob | None:
        """Return the next job for the cluster that is up; for any cluster if none is up and nothing runs."""
        up = self.cluster.config if self.cluster is not None else "" if self.running else None
        return self.queue.first(up)

    def fits(self, job: PlannedJob) -> bool:
        """Return whether a job can start now.

        Once a job has its workers, jobs of ours start for as many workers again: they wait until one ends.
        """
        if self.max_jobs is not None and len(self.running) >= self.max_jobs:
            return False
        if self.cluster is None:
            most = os.cpu_count() or 1
            return len(self.running) < (most if not job.is_ours or job.is_dry else 1)
        if self.cluster.scheduler is None:
            return False
        total = self.cluster.workers
        used = sum(other.planned.need.workers or total for other in self.running)
        may_wait = job.is_ours and any(other.row.workers for other in self.running)
        return not self.running or used + (job.need.workers or total) <= (2 * total if may_wait else total)


log = logging.getLogger(__name__)
COUNT_S = 1.0
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
            while os.getppid() == parent and not pipe.poll(COUNT_S):
                if workers != (workers := _count_workers(client)):
                    pipe.send(("workers", workers))
    except KeyboardInterrupt:
        return "workers", 0
    except DdpHydraError as error:
        return "failed", str(error)
    return "workers", 0


def _count_workers(client: Any) -> int:
    return len(workers_of(client))
