"""Runs the jobs of a sweep: as many at once as fit, the next one the moment a gang ends."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import importlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ddp_hydra.cluster import connect
from ddp_hydra.console.signals import SECOND, Interrupts
from ddp_hydra.errors import ClusterError, ConfigError, Interrupted, SweepFailed
from ddp_hydra.sweep import job_status, planned_job
from ddp_hydra.sweep.cluster_process import ClusterHost
from ddp_hydra.sweep.forked_process import Child, listen
from ddp_hydra.sweep.job_process import Ended, coordinate
from ddp_hydra.sweep.job_returns import failed, with_trace
from ddp_hydra.sweep.live_table import Display
from ddp_hydra.sweep.planned_job import CachingConfigLoader, PlannedJob
from ddp_hydra.sweep.plot import draw
from ddp_hydra.sweep.queue import Queue
from ddp_hydra.sweep.rows import Row, State, counted
from ddp_hydra.sweep.settings import Settings, objective_of
from ddp_hydra.sweep.summary_files import Overview, read

log = logging.getLogger(__name__)
LISTEN_S = 0.2
LOOK_S = 0.2
"""How often is looked at what the jobs say of themselves."""
PAINT_S = 30.0
"""How long a picture may take."""
STOP_S = 10.0
"""How long a job that took too long may take to end."""
PRELOAD = (
    "ddp_hydra.job.run",
    "ddp_hydra.dispatch.gang",
    *(
        f"ddp_hydra.writers.{name}"
        for name in ("checkpoints", "handler", "hparams", "progress", "status", "tensorboard")
    ),
)
"""Modules that every job imports; imported once, before the processes of the jobs are forked."""


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

    planned: PlannedJob
    child: Child
    begun: float = field(default_factory=time.monotonic)
    stop_reason: str = ""
    kill_at: float | None = None

    @property
    def row(self) -> Row:
        """What is known of it."""
        return self.planned.row

    @property
    def wall_s(self) -> float:
        """How long it has taken, with the parts before it went on."""
        return self.planned.spent_s + time.monotonic() - self.begun


class Sweep:
    """All jobs of one `--multirun`, which Hydra hands over in one or more batches.

    Args:
        folder: the sweep's.
        settings: of the launcher.
        context: Hydra's.
        loader: of configs.
        task: the app's function.
        config: as Hydra composed it without the swept overrides.
        goes_on: with what an earlier start has left in the folder.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        context: HydraContext,
        loader: CachingConfigLoader,
        task: TaskFunction,
        config: DictConfig,
        goes_on: bool,
    ) -> None:
        self.folder, self.settings, self.context, self.task = folder, settings, context, task
        self.lock = lock(folder)
        own_need = planned_job.own_need(settings.ranks, settings.cluster)
        earlier = read(folder) if goes_on else None
        self.queue = Queue(folder, loader, config, own_need, earlier, settings.retry_failed)
        self.objective = objective_of(config, settings.direction)
        self.overview, self.display = Overview(folder, self.objective), Display(self.objective)
        self.name = f"{getpass.getuser()}@{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.rows = earlier or []
        for row in self.rows:
            if row.state == State.running:  # then, by a sweep that was killed
                row.state = State.interrupted
        self.host: ClusterHost | None = None
        self.painter: Child | None = None
        self.running: list[Running] = []
        self.stop_reason = ""
        self.looked = 0.0
        self.interrupts = Interrupts(self.notice)
        if not earlier:  # beside Hydra's checking of all jobs; of a sweep that goes on, all may be done
            self.bring_up(planned_job.first_need(config).cluster or own_need.cluster)
        preload(planned_job.is_ours(config))

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
        jobs = [self.queue.enter(overrides, first + index) for index, overrides in enumerate(job_overrides)]
        known = [id(job.earlier) for job in jobs]
        self.rows = [row for row in self.rows if id(row) not in known] + [job.row for job in jobs]
        try:
            with self.interrupts.caught(), self.interrupts.deferred():
                self.work()
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

    # -- running them --------------------------------------------------------------------------------------

    def work(self) -> None:
        """Run all jobs of the queue."""
        while self.running or (self.queue and not self.is_stopping):
            self.start_what_fits()
            busy = self.queue.compose_ahead()
            talking = [self.host.child] if self.host is not None and not self.host.is_gone else []
            listen(talking + [job.child for job in self.running], 0.0 if busy else LISTEN_S)
            for job in [job for job in self.running if not job.child.hear()]:
                self.on_end(job)
            self.look()
            self.overview.write(self.rows)
            self.display.show(self.rows)
            if not self.queue and not self.running and not self.is_stopping and self.queue.turn():
                self.bring_up(self.queue.jobs[0].need.cluster)

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

    def start_what_fits(self) -> None:
        """Start jobs for which there are workers, and some more, which wait for the next ones to come free."""
        try:
            job = self.next_job()
            if job is not None and not self.running:
                self.bring_up(job.need.cluster)
            if self.host is not None:
                self.host.look()
                if self.host.is_gone and job is not None:
                    log.warning("the cluster is gone: another one is brought up")
                    self.bring_up(self.host.config)
            while job is not None and not self.is_stopping and self.fits(job):
                self.start(self.queue.take())
                job = self.next_job()
        except ClusterError as error:
            wanted = self.host.config if self.host else ""
            self.close_host()
            self.queue.fail_all_on(wanted, error)

    def next_job(self) -> PlannedJob | None:
        """The job whose turn it is on the cluster that is up."""
        up = self.host.config if self.host is not None else "" if self.running else None
        return self.queue.first(up)

    def fits(self, job: PlannedJob) -> bool:
        """Whether a job can begin now."""
        if self.settings.max_jobs is not None and len(self.running) >= self.settings.max_jobs:
            return False
        if self.host is None:
            at_once = os.cpu_count() or 1
            return len(self.running) < (at_once if not job.is_ours or job.is_dry else 1)
        total = self.host.workers
        ranks = job.need.ranks or total
        used = sum(other.planned.need.ranks or total for other in self.running)
        waiting = sum(not other.row.workers for other in self.running)
        may_wait = job.is_ours and waiting < max(1, total // max(1, ranks))
        return self.host.scheduler is not None and (used + ranks <= total or may_wait)

    def start(self, job: PlannedJob) -> None:
        """Start a job in a process of its own."""
        job.row.state, job.row.message = State.running, ""
        if not job.is_ours or not job.need.cluster:
            job.row.workers = job.need.ranks or 1  # it says nothing of them itself, and begins at once
        with contextlib.suppress(OSError):
            (job.folder / "status.json").unlink(missing_ok=True)  # of an earlier start that was killed
        work = partial(coordinate, job, self.context, self.task, self.host.scheduler if self.host else None)
        self.running.append(Running(job, Child(lambda pipe: work(), job.folder / "logs" / "job.log", [self.lock])))

    def on_end(self, job: Running) -> None:
        """A job's process has ended."""
        self.running.remove(job)
        said = job.child.values[-1] if job.child.values else None
        job.child.end()
        row, folder = job.row, job.planned.folder
        row.wall_s, row.eta_s = job.wall_s, None
        ended = said if isinstance(said, Ended) else self.silent_end(job)
        if job.stop_reason and ended.state != State.done:
            ended = Ended(State.failed, None, job.stop_reason)
        row.state, row.message = ended.state, ended.message
        if job.planned.is_ours:
            job_status.read_summary(row, folder, self.objective)
        if ended.result is not None:
            job.planned.result = with_trace(ended.result, ended.trace)
            if ended.state == State.done:
                job_status.take_value(row, ended.result.return_value, self.objective)
        if ended.state == State.failed and self.settings.fail_fast and not self.is_stopping:
            self.stop_all(f"job {row.number} failed ({row.message}), and hydra.launcher.fail_fast=true")

    def silent_end(self, job: Running) -> Ended:
        """How a job ended whose process has said nothing: it crashed, or was killed."""
        log_file = job.planned.folder / "logs" / "job.log"
        message = f"its own process {job.child.how_it_ended()}; see {log_file}"
        return Ended(State.interrupted if self.interrupts.wanted else State.failed, None, message)

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
            if job.planned.is_ours:
                waits = self.host is not None and not job.row.workers
                job_status.read_status(job.row, job.planned.folder, self.objective)
                if waits:  # for workers until now
                    job.begun = now
            job.row.wall_s = job.wall_s
            self.check_time(job, now)

    def check_time(self, job: Running, now: float) -> None:
        """End a job that takes too long."""
        limit_s = self.settings.job_timeout_s
        if limit_s is not None and now - job.begun > limit_s and not job.stop_reason:
            job.stop_reason = f"it took longer than hydra.launcher.job_timeout_s={limit_s:g}"
            job.kill_at = now + STOP_S
            job.child.signal(signal.SIGINT)
        if job.kill_at is not None and now > job.kill_at:
            job.child.signal(signal.SIGKILL)

    def notice(self) -> str:
        """What is said when the user wants to end."""
        return f"the jobs that run save a checkpoint at their next step, and no other begins, in {self.shown}. {SECOND}"

    def stop_all(self, why: str) -> None:
        """Start no more jobs, and have those that run save what they have."""
        self.stop_reason = why
        if not self.interrupts.wanted:  # then it has been said
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
        self.await_painter()
        os.close(self.lock)

    # -- how it ended --------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Write the overview, and show how it ended."""
        self.overview.write(self.rows, now=True)
        self.paint()
        lines = [f"job {row.number} failed: {row.message}" for row in self.rows if row.state == State.failed]
        self.display.close(self.rows, [*lines, self.closing_line])

    def paint(self) -> None:
        """Draw the picture, beside whatever comes next."""
        self.await_painter()
        picture = partial(draw, self.rows, self.objective, self.folder / "sweep.png")
        self.painter = Child(lambda pipe: picture(), not_its=[self.lock])

    def await_painter(self) -> None:
        """Let a picture that is being drawn be finished."""
        painter, self.painter = self.painter, None
        if painter is not None:
            painter.process.join(PAINT_S)
            painter.end()

    @property
    def closing_line(self) -> str:
        """How many came to which end, and where to look."""
        return f"{counted(self.rows)}  ->  {self.shown}/sweep.md"

    def result(self, job: PlannedJob) -> JobReturn:
        """What Hydra's sweeper gets of a job."""
        if job.is_ours and job.row.state != State.done:
            return failed(job, SweepFailed(self.closing_line))
        why = job.row.message or self.stop_reason
        unfinished = f"job {job.row.number} was not run to its end: {why}"
        return job.result or failed(job, SweepFailed(unfinished))


def preload(ours: bool) -> None:
    """Import, once for all the processes to come, what each job needs."""
    connect.load()
    for name in PRELOAD if ours else ():
        importlib.import_module(name)


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
