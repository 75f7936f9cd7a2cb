"""Runs the jobs of a sweep: as many at once as fit, the next one the moment a gang ends."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
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
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ddp_hydra import cluster
from ddp_hydra.cluster import Scheduler
from ddp_hydra.errors import ConfigError, DdpHydraError, Interrupted, SweepFailed
from ddp_hydra.interrupts import Interrupts
from ddp_hydra.sweep import plan
from ddp_hydra.sweep.child import Child, listen
from ddp_hydra.sweep.coordinator import Ended, coordinate, with_trace
from ddp_hydra.sweep.display import Display
from ddp_hydra.sweep.host import ClusterHost
from ddp_hydra.sweep.overview import Overview, read
from ddp_hydra.sweep.plan import Need, Planned
from ddp_hydra.sweep.rows import Objective, Row, State, counted

log = logging.getLogger(__name__)
LISTEN_S = 0.2
LOOK_S = 0.5
"""How often is looked at what the jobs say of themselves."""


@dataclass(frozen=True)
class Settings:
    """What `hydra.launcher` takes.

    Args:
        max_jobs: run no more at once; None for as many as fit.
        fail_fast: stop at the first job that fails.
        retry_failed: run jobs again that failed when the sweep was started before.
        job_timeout_s: a job that takes longer is stopped, and has failed; None for no limit.
        ranks: for apps whose config is not one of ours: run the task on so many ranks; None for none.
        cluster: for the same: `_target_` and arguments of the cluster; None for a local one.
    """

    max_jobs: int | None = None
    fail_fast: bool = False
    retry_failed: bool = False
    job_timeout_s: float | None = None
    ranks: int | None = None
    cluster: Any = None


@dataclass
class Running:
    """A job at work.

    Args:
        planned: the job.
        child: its process.
        begun: when, by the clock that only grows.
        stop_reason: why it was told to end, where it was.
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
        goes_on: bool = False,
    ) -> None:
        self.folder, self.settings, self.context, self.task, self.config = folder, settings, context, task, config
        self.lock = lock(folder)
        # Others' apps write over what is there, as Hydra does, unless they are told to resume.
        self.goes_on = goes_on or plan.is_ours(config)
        self.numbers = plan.Numbers(read(folder) if self.goes_on else [])
        self.own_need = plan.own_need(settings.ranks, settings.cluster)
        self.objective = objective_of(config)
        self.overview = Overview(folder, self.objective)
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
        self.stop_reason = ""
        jobs = [self.plan(overrides, first + index) for index, overrides in enumerate(job_overrides)]
        todo = [job for job in jobs if job.row.number not in self.returns]
        self.display = Display(self.objective)
        try:
            with self.interrupts.caught(), self.interrupts.patience():
                for group in plan.groups(todo):
                    self.run_group(group)
        finally:
            self.end_all()
            self.show(last=True)
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
        job = plan.compose(self.context, self.config, overrides, wanted, self.own_need, str(self.folder))
        number, earlier = self.numbers.of(job.row.overrides, wanted)
        if number != wanted:
            job = plan.compose(self.context, self.config, overrides, number, self.own_need, str(self.folder))
        if earlier is None:
            if self.goes_on:
                plan.refuse_foreign_folder(job)
        elif earlier.state == State.done or (earlier.state == State.failed and not self.settings.retry_failed):
            job.row = earlier
            self.returns[number] = self.earlier_result(job)
        else:
            plan.go_on(job, earlier)
        self.rows.append(job.row)
        return job

    def earlier_result(self, job: Planned) -> JobReturn:
        """What a job returned when the sweep was started before."""
        result = JobReturn(
            overrides=job.row.overrides, cfg=job.task_config, working_dir=str(job.folder), status=JobStatus.COMPLETED
        )
        result._return_value = job.row.value
        if job.row.state == State.failed:
            result.status = JobStatus.FAILED
            result._return_value = SweepFailed(
                f"job {job.row.number} failed before ({job.row.message}): run it again with "
                "hydra.launcher.retry_failed=true"
            )
        return result

    # -- running them --------------------------------------------------------------------------------------

    def run_group(self, jobs: Sequence[Planned]) -> None:
        """Run jobs that share a cluster."""
        waiting = deque(jobs)
        while (waiting and not self.is_stopping) or self.running:
            with self.cluster_errors(waiting):
                host = self.host_of(jobs[0].need) if waiting else self.host
                while waiting and not self.is_stopping and self.fits(waiting[0], host):
                    self.start(waiting.popleft(), host.wait() if host else None)
            listen([job.child for job in self.running], LISTEN_S)
            for job in [job for job in self.running if not job.child.hear()]:
                self.on_end(job)
            self.look()
            self.show()

    @property
    def is_stopping(self) -> bool:
        """Whether no more jobs are started."""
        return bool(self.stop_reason) or self.interrupts.wanted

    def host_of(self, need: Need) -> ClusterHost | None:
        """The cluster that jobs of this need run on; one at a time is up."""
        if self.host is not None and (self.host.config != need.cluster or self.host.is_gone):
            self.close_host()
        if self.host is None and need.cluster:
            cluster.load()  # once, for all the processes to come
            self.host = ClusterHost(need.cluster, self.name, self.folder / "cluster.log")
        if self.host is not None:
            self.host.wait()
            self.host.look()
        return self.host

    @contextmanager
    def cluster_errors(self, waiting: deque[Planned]) -> Iterator[None]:
        """Where there is no cluster, none of the jobs that wait for it can be run."""
        try:
            yield
        except DdpHydraError as error:
            self.close_host()
            while waiting:
                job = waiting.popleft()
                self.fail(job, error)

    def fits(self, job: Planned, host: ClusterHost | None) -> bool:
        """Whether a job can begin now: it finds workers, or is the one that waits for the next to come free."""
        if len(self.running) >= (self.settings.max_jobs or 10**6):
            return False
        if host is None:
            return len(self.running) < (1 if job.is_ours else os.cpu_count() or 1)
        used = sum(other.planned.need.ranks or host.workers for other in self.running)
        return used + (job.need.ranks or host.workers) <= host.workers or all(
            other.row.workers for other in self.running
        )

    def start(self, job: Planned, scheduler: Scheduler | None) -> None:
        """Start a job in a process of its own."""
        job.row.state = State.running
        work = partial(coordinate, job, self.context, self.task, scheduler)
        self.running.append(Running(job, Child(work, job.folder / "logs" / "job.log")))

    def on_end(self, job: Running) -> None:
        """A job's process has ended."""
        self.running.remove(job)
        ended = job.child.values[-1] if job.child.values else None
        job.child.end()
        row = job.row
        row.wall_s, row.eta_s = time.monotonic() - job.begun, None
        if not isinstance(ended, Ended):
            state = State.interrupted if self.interrupts.wanted else State.failed
            message = f"its coordinating process {job.child.how_it_ended()}; see {job.planned.folder}/logs/job.log"
            ended = Ended(state, None, message)
        if job.stop_reason:
            ended = Ended(State.failed, None, job.stop_reason)
        row.state, row.message = ended.state, ended.message
        if ended.result is not None:
            self.returns[row.number] = with_trace(ended)
        if ended.state == State.done and ended.result is not None:
            row.value = plain_value(ended.result.return_value)
            if isinstance(row.value, float | int) and not isinstance(row.value, bool):
                row.objective = row.metrics["value"] = float(row.value)
        if job.planned.is_ours:
            self.read_summary(job.planned)
        if ended.state == State.failed and self.settings.fail_fast and not self.stop_reason:
            self.stop_all(f"job {row.number} failed ({row.message}), and hydra.launcher.fail_fast=true")

    def fail(self, job: Planned, error: Exception) -> None:
        """A job cannot even be started."""
        job.row.state, job.row.message = State.failed, str(error).partition("\n")[0]
        self.returns[job.row.number] = failed(job, error)

    # -- watching and stopping -----------------------------------------------------------------------------

    def look(self) -> None:
        """Look how far the jobs are, whether one takes too long, and whether the user wants to end."""
        now = time.monotonic()
        if now - self.looked < LOOK_S:
            return
        self.looked = now
        if self.interrupts.wanted and not self.stop_reason:
            self.stop_all("interrupted")
        limit_s = self.settings.job_timeout_s
        for job in self.running:
            job.row.wall_s = now - job.begun
            if job.planned.is_ours:
                self.read_status(job.planned)
            if limit_s is not None and job.row.wall_s > limit_s and not job.stop_reason:
                job.stop_reason = f"it took longer than hydra.launcher.job_timeout_s={limit_s:g}"
                job.kill_at = now + 5.0
                job.child.signal(signal.SIGTERM)
            if job.kill_at is not None and now > job.kill_at:
                job.child.signal(signal.SIGKILL)

    def stop_all(self, why: str) -> None:
        """Start no more jobs, and have those that run save what they have."""
        self.stop_reason = why
        log.warning("%s: the jobs that run are asked to end", why)
        for job in self.running:
            job.child.signal(signal.SIGINT)

    def end_all(self) -> None:
        """Leave no process behind, however it ends."""
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
        """End all, also the cluster, which would else wait for another batch."""
        self.end_all()
        self.close_host()
        os.close(self.lock)

    # -- telling -------------------------------------------------------------------------------------------

    def read_status(self, job: Planned) -> None:
        """Take over what a running job says of itself."""
        status = read_json(job.folder / "status.json")
        row = job.row
        row.step, row.total_steps = number(status.get("step"), int), number(status.get("total_steps"), int)
        row.epoch, row.epochs = number(status.get("epoch")), number(status.get("epochs"))
        row.workers = number(status.get("world_size"), int) or row.workers
        row.eta_s = number(status.get("eta_s"))
        self.take_metrics(row, status.get("metrics"))

    def read_summary(self, job: Planned) -> None:
        """Take over how a job ended."""
        summary = read_json(job.folder / "summary.json")
        job.row.step = number(summary.get("steps"), int)
        job.row.workers = number(summary.get("world_size"), int) or job.row.workers
        self.take_metrics(job.row, summary.get("metrics"))

    def take_metrics(self, row: Row, metrics: Any) -> None:
        """Take over metrics, and the objective among them."""
        if isinstance(metrics, dict):
            row.metrics |= {str(name): number(value) for name, value in metrics.items()}
            if self.objective is not None and row.metrics.get(self.objective.metric) is not None:
                row.objective = row.metrics[self.objective.metric]

    def show(self, last: bool = False) -> None:
        """Write the overview, and show it."""
        self.overview.write(self.rows, now=last)
        if not last:
            self.display.show(self.rows)
            return
        from ddp_hydra.sweep.picture import draw

        draw(self.rows, self.objective, self.folder / "sweep.png")
        lines = [f"job {row.number} failed: {row.message}" for row in self.rows if row.state == State.failed]
        self.display.close(self.rows, [*lines, f"{counted(self.rows)}  ->  {self.shown}/sweep.md"])

    def result(self, job: Planned) -> JobReturn:
        """What Hydra's sweeper gets of a job."""
        found = self.returns.get(job.row.number)
        if found is None:
            found = failed(job, SweepFailed(f"job {job.row.number} was not run to its end: {self.why_not(job)}"))
        if job.is_ours and job.row.state != State.done:
            number_failed = sum(row.state != State.done for row in self.rows)
            message = f"{number_failed} of {len(self.rows)} jobs failed: see {self.shown}/sweep.md"
            found = failed(job, SweepFailed(message))
        return found

    def why_not(self, job: Planned) -> str:
        """Why a job has no result."""
        return job.row.message or self.stop_reason


def failed(job: Planned, error: Exception) -> JobReturn:
    """The result of a job that has none of its own."""
    result = JobReturn(
        overrides=job.row.overrides, cfg=job.task_config, working_dir=str(job.folder), status=JobStatus.FAILED
    )
    result._return_value = error
    return result


def objective_of(config: DictConfig) -> Objective | None:
    """What jobs are compared by; None where the app does not say."""
    objective = config.get("objective")
    if isinstance(objective, DictConfig) and objective.get("metric"):
        direction = objective.get("direction", "maximize")
        return Objective(str(objective.metric), getattr(direction, "name", direction) == "maximize")
    direction = config.hydra.sweeper.get("direction")
    if direction is not None:
        return Objective("value", getattr(direction, "name", direction) == "maximize")
    return None


def plain_value(value: Any) -> Any:
    """A returned value as JSON keeps it; None for what it does not."""
    try:
        kept = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None
    return kept if kept == value or isinstance(value, tuple) else None


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; {} where there is none, or it holds something else."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


def number(value: Any, kind: type = float) -> Any:
    """A number as one of `kind`; None for anything else."""
    return kind(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


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
        raise ConfigError(
            f"another sweep is running in {folder}: wait for it, or give another hydra.sweep.dir"
        ) from None
    return handle
