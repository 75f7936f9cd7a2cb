"""Runs the jobs of a sweep: as many at once as fit, the next one the moment a gang ends."""

from __future__ import annotations

import fcntl
import getpass
import importlib
import logging
import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ddp_hydra import cluster
from ddp_hydra.errors import ConfigError, DdpHydraError, Interrupted, SweepFailed
from ddp_hydra.interrupts import Interrupts
from ddp_hydra.sweep import plan, reports
from ddp_hydra.sweep.child import Child, listen
from ddp_hydra.sweep.coordinator import Ended, coordinate, with_trace
from ddp_hydra.sweep.display import Display
from ddp_hydra.sweep.host import ClusterHost
from ddp_hydra.sweep.overview import Overview, read
from ddp_hydra.sweep.picture import draw
from ddp_hydra.sweep.plan import Planned
from ddp_hydra.sweep.rows import Row, State, counted
from ddp_hydra.sweep.settings import Settings, objective_of

log = logging.getLogger(__name__)
LISTEN_S = 0.2
LOOK_S = 0.5
"""How often is looked at what the jobs say of themselves."""
STOP_S = 10.0
"""How long a job that took too long may take to end."""


@dataclass
class Running:
    """A job at work.

    Args:
        planned: the job.
        child: its process.
        begun: when, by the clock that only grows.
        stop_reason: why it alone was told to end.
        kill_at: when it is ended by force.
    """

    planned: Planned
    child: Child
    begun: float = field(default_factory=time.monotonic)
    stop_reason: str = ""
    kill_at: float | None = None

    @property
    def row(self) -> Row:
        """What is known of it."""
        return self.planned.row


class Sweep:
    """All jobs of one `--multirun`, which Hydra hands over in one or more batches.

    Args:
        folder: the sweep's.
        settings: of the launcher.
        context: Hydra's.
        task: the app's function.
        config: as Hydra composed it without the swept overrides.
        goes_on: with what an earlier start has left in the folder.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        context: HydraContext,
        task: TaskFunction,
        config: DictConfig,
        goes_on: bool,
    ) -> None:
        self.folder, self.settings, self.context, self.task, self.config = folder, settings, context, task, config
        self.lock = lock(folder)
        self.goes_on = goes_on
        self.numbers = plan.Numbers(read(folder) if goes_on else [])
        self.own_need = plan.own_need(settings.ranks, settings.cluster)
        self.objective = objective_of(config)
        self.overview, self.display = Overview(folder, self.objective), Display(self.objective)
        self.name = f"{getpass.getuser()}@{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.rows: list[Row] = []
        self.host: ClusterHost | None = None
        self.running: list[Running] = []
        self.returns: dict[int, JobReturn] = {}
        self.stop_reason = ""
        self.looked = 0.0
        self.interrupts = Interrupts()

    def run(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Run one batch of jobs.

        Args:
            job_overrides: the overrides of each.
            first: number of the first.

        Returns:
            One result per job, in order; a failed one raises when its value is read.

        Raises:
            Interrupted: the user ended the sweep.
        """
        try:
            with self.interrupts.caught(), self.interrupts.patience():
                jobs = [self.plan(overrides, first + index) for index, overrides in enumerate(job_overrides)]
                for group in plan.groups([job for job in jobs if job.row.number not in self.returns]):
                    self.run_group(group)
        finally:
            self.end_all()
            self.conclude()
        if self.interrupts.wanted:
            raise Interrupted(f"{counted(self.rows)}: go on with the same command and hydra.sweep.dir={self.shown}")
        return [self.result(job) for job in jobs]

    @property
    def shown(self) -> str:
        """The sweep's folder, as one would type it."""
        relative = os.path.relpath(self.folder)
        return str(self.folder) if relative.startswith("..") else relative

    # -- which jobs ----------------------------------------------------------------------------------------

    def plan(self, overrides: Sequence[str], wanted: int) -> Planned:
        """Compose a job, and find out what is known of it from an earlier start."""
        compose = partial(plan.compose, self.context, self.config, overrides, self.own_need, self.folder)
        job = compose(wanted)
        number, earlier = self.numbers.of(job.row.overrides, wanted)
        if number != wanted:
            job = compose(number)
        if earlier is None:
            if self.goes_on:
                plan.refuse_foreign_folder(job)
        elif earlier.state == State.done or (earlier.state == State.failed and not self.settings.retry_failed):
            job.row = earlier
            self.returns[number] = earlier_result(job)
        else:
            plan.go_on(job, earlier)
        self.rows.append(job.row)
        if self.host is None and number not in self.returns:
            self.bring_up(job.need.cluster)  # beside the composing of the others
        return job

    # -- running them --------------------------------------------------------------------------------------

    def run_group(self, jobs: Sequence[Planned]) -> None:
        """Run jobs that share a cluster."""
        waiting = deque(jobs)
        if jobs[0].is_dry:
            importlib.import_module("ddp_hydra.dry_run")  # once, for all the processes to come: it takes torch along
        self.bring_up(jobs[0].need.cluster)
        while self.running or (waiting and not self.is_stopping):
            with self.cluster_errors(waiting):
                self.start_what_fits(waiting)
            talking = [self.host.child] if self.host is not None and not self.host.is_gone else []
            listen(talking + [job.child for job in self.running], LISTEN_S)
            for job in [job for job in self.running if not job.child.hear()]:
                self.on_end(job)
            self.look()
            self.overview.write(self.rows)
            self.display.show(self.rows)

    @property
    def is_stopping(self) -> bool:
        """Whether no more jobs are started."""
        return bool(self.stop_reason) or self.interrupts.wanted

    def bring_up(self, config: str) -> None:
        """Have a cluster come up, if it is not there; one at a time is, so that none disturbs another's timing."""
        if self.host is not None and (self.host.config != config or self.host.is_gone):
            self.close_host()
        if self.host is None and config:
            self.host = ClusterHost(config, self.name, self.folder / "cluster.log", [self.lock])
            cluster.load()  # once, for all the processes to come

    def start_what_fits(self, waiting: deque[Planned]) -> None:
        """Start jobs for which there are workers, and one more, which waits for the next ones to come free.

        Raises:
            ClusterError: there is no cluster.
        """
        if self.host is not None:
            self.host.look()
            if self.host.is_gone and waiting:
                log.warning("the cluster is gone: another one is brought up")
                self.bring_up(self.host.config)
        while waiting and not self.is_stopping and self.fits(waiting[0]):
            self.start(waiting.popleft())

    def fits(self, job: Planned) -> bool:
        """Whether a job can begin now."""
        if self.settings.max_jobs is not None and len(self.running) >= self.settings.max_jobs:
            return False
        if self.host is None:
            at_once = os.cpu_count() or 1
            return len(self.running) < (at_once if not job.is_ours or job.is_dry else 1)
        total = self.host.workers
        used = sum(other.planned.need.ranks or total for other in self.running)
        somebody_waits = any(not other.row.workers for other in self.running)
        return self.host.scheduler is not None and (used + (job.need.ranks or total) <= total or not somebody_waits)

    def start(self, job: Planned) -> None:
        """Start a job in a process of its own."""
        job.row.state, job.row.message = State.running, ""
        work = partial(coordinate, job, self.context, self.task, self.host.scheduler if self.host else None)
        self.running.append(Running(job, Child(work, job.folder / "logs" / "job.log", [self.lock])))

    def on_end(self, job: Running) -> None:
        """A job's process has ended."""
        self.running.remove(job)
        said = job.child.values[-1] if job.child.values else None
        job.child.end()
        row, folder = job.row, job.planned.folder
        row.wall_s, row.eta_s = time.monotonic() - job.begun, None
        ended = said if isinstance(said, Ended) else self.silent_end(job)
        if job.stop_reason and ended.state != State.done:
            ended = Ended(State.failed, None, job.stop_reason)
        row.state, row.message = ended.state, ended.message
        if job.planned.is_ours:
            reports.read_summary(row, folder, self.objective)
        if ended.result is not None:
            self.returns[row.number] = with_trace(ended)
            if ended.state == State.done:
                reports.take_value(row, ended.result.return_value, self.objective)
        if ended.state == State.failed and self.settings.fail_fast and not self.is_stopping:
            self.stop_all(f"job {row.number} failed ({row.message}), and hydra.launcher.fail_fast=true")

    def silent_end(self, job: Running) -> Ended:
        """How a job ended whose process has said nothing: it crashed, or was killed."""
        log_file = job.planned.folder / "logs" / "job.log"
        message = f"its own process {job.child.how_it_ended()}; see {log_file}"
        return Ended(State.interrupted if self.interrupts.wanted else State.failed, None, message)

    @contextmanager
    def cluster_errors(self, waiting: deque[Planned]) -> Iterator[None]:
        """Where there is no cluster, none of the jobs that wait for it can be run."""
        try:
            yield
        except DdpHydraError as error:
            self.close_host()
            for job in waiting:
                job.row.state, job.row.message = State.failed, str(error).partition("\n")[0]
                self.returns[job.row.number] = failed(job, error)
            waiting.clear()

    # -- watching and stopping -----------------------------------------------------------------------------

    def look(self) -> None:
        """Look how far the jobs are, whether one takes too long, and whether the user wants to end."""
        now = time.monotonic()
        if now - self.looked < LOOK_S:
            return
        self.looked = now
        if self.interrupts.wanted and not self.stop_reason:
            self.stop_all("interrupted")
        for job in self.running:
            job.row.wall_s = now - job.begun
            if job.planned.is_ours:
                reports.read_status(job.row, job.planned.folder, self.objective)
            self.check_time(job, now)

    def check_time(self, job: Running, now: float) -> None:
        """End a job that takes too long."""
        limit_s = self.settings.job_timeout_s
        if limit_s is not None and job.row.wall_s > limit_s and not job.stop_reason:
            job.stop_reason = f"it took longer than hydra.launcher.job_timeout_s={limit_s:g}"
            job.kill_at = now + STOP_S
            job.child.signal(signal.SIGINT)
        if job.kill_at is not None and now > job.kill_at:
            job.child.signal(signal.SIGKILL)

    def stop_all(self, why: str) -> None:
        """Start no more jobs, and have those that run save what they have."""
        self.stop_reason = why
        log.warning("%s: the jobs that run are asked to end", why)
        for job in self.running:
            job.child.signal(signal.SIGINT)

    def end_all(self) -> None:
        """Leave no job behind, however it ends."""
        for job in self.running:
            job.row.state, job.row.message = State.interrupted, "ended at once"
            job.child.signal(signal.SIGINT)
        for job in self.running:
            job.child.end()
        self.running.clear()

    def close_host(self) -> None:
        """Take the cluster down."""
        host, self.host = self.host, None
        if host is not None:
            host.close()

    def close(self) -> None:
        """End all, also the cluster, which waits for another batch."""
        self.end_all()
        self.close_host()
        os.close(self.lock)

    # -- how it ended --------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Write the overview, and show how it ended."""
        self.overview.write(self.rows, now=True)
        draw(self.rows, self.objective, self.folder / "sweep.png")
        lines = [f"job {row.number} failed: {row.message}" for row in self.rows if row.state == State.failed]
        self.display.close(self.rows, [*lines, self.closing_line])

    @property
    def closing_line(self) -> str:
        """How many came to which end, and where to look."""
        return f"{counted(self.rows)}  ->  {self.shown}/sweep.md"

    def result(self, job: Planned) -> JobReturn:
        """What Hydra's sweeper gets of a job."""
        if job.is_ours and job.row.state != State.done:
            return failed(job, SweepFailed(self.closing_line))
        why = job.row.message or self.stop_reason
        unfinished = f"job {job.row.number} was not run to its end: {why}"
        return self.returns.get(job.row.number) or failed(job, SweepFailed(unfinished))


def failed(job: Planned, error: Exception) -> JobReturn:
    """The result of a job that has none of its own."""
    return _result(job, JobStatus.FAILED, error)


def earlier_result(job: Planned) -> JobReturn:
    """What a job came to when the sweep was started before."""
    if job.row.state == State.done:
        return _result(job, JobStatus.COMPLETED, job.row.value)
    why = f"job {job.row.number} failed before ({job.row.message})"
    return failed(job, SweepFailed(f"{why}: run it again with hydra.launcher.retry_failed=true"))


def _result(job: Planned, status: JobStatus, value: object) -> JobReturn:
    row = job.row
    result = JobReturn(overrides=row.overrides, cfg=job.task_config, working_dir=str(job.folder), status=status)
    result._return_value = value
    return result


def lock(folder: Path) -> int:
    """Keep others from running a sweep in the same folder.

    Returns:
        A descriptor; closing it lets go.

    Raises:
        ConfigError: somebody does already.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"another sweep runs in {folder}: wait for it, or give another hydra.sweep.dir") from None
    return handle
