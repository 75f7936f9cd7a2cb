"""Runs the jobs of a sweep: as many at once as fit, and the next one as soon as a gang ends."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ddp_hydra import forked
from ddp_hydra.cluster import connection
from ddp_hydra.console.signals import SECOND, SIGNALS, Interrupts, held_back
from ddp_hydra.console.text import typed
from ddp_hydra.errors import Interrupted, SweepFailed
from ddp_hydra.job.summary import shown_path
from ddp_hydra.rank import fork_client
from ddp_hydra.storage.manifest import has_checkpoint
from ddp_hydra.sweep import planned_job, summary_files
from ddp_hydra.sweep.planned_job import PlannedJob, preload, run_planned_job
from ddp_hydra.sweep.plot import DRAW_S, draw_at_end
from ddp_hydra.sweep.pruning import FINISH_S, Pruning
from ddp_hydra.sweep.queue import CachingConfigLoader, JobQueue
from ddp_hydra.sweep.rows import JobState, describe_counts
from ddp_hydra.sweep.scheduler import (
    ClusterProcess,
    ForkedProcess,
    JobScheduler,
    RunningJob,
    sweep_locked,
    wait_for_message,
)
from ddp_hydra.sweep.settings import SweepSettings, is_optuna, objective_of, stop_policy
from ddp_hydra.sweep.stopping import JobStopper
from ddp_hydra.sweep.summary_files import SummaryFiles, read
from ddp_hydra.sweep.tables import LiveTable

log = logging.getLogger(__name__)
MESSAGE_WAIT_S = 0.2
POLL_S = 0.2
"""How often the status files of the jobs are read."""


class Sweep:
    """Runs all jobs of one `--multirun`, which Hydra hands over in one or more batches."""

    def __init__(
        self,
        folder: Path,
        settings: SweepSettings,
        context: HydraContext,
        loader: CachingConfigLoader,
        task: TaskFunction,
        config: DictConfig,
        is_resumed: bool,
    ) -> None:
        self.folder, self.settings, self.context, self.task = folder, settings, context, task
        self.locks = contextlib.ExitStack()
        self.locks.enter_context(sweep_locked(folder))
        own_need = planned_job.own_need(settings.ranks, settings.cluster)
        earlier = read(folder) if is_resumed else None
        self.objective = objective_of(config, settings.direction)
        metric = self.objective.metric
        self.tells_optuna = is_optuna(config) and not (planned_job.is_ours(config) and config.get("dry_run"))
        self.queue = JobQueue(folder, loader, config, own_need, earlier, settings.retry_failed, metric)
        name = f"{connection.user_name()}@{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        start_cluster = partial(ClusterProcess, sweep=name, output=folder / "cluster.log")
        self.scheduler = JobScheduler(self.queue, settings.max_jobs, start_cluster)
        self.running = self.scheduler.running
        mirror = str(config.results.get("mirror") or "") if planned_job.is_ours(config) else ""
        self.pruning = Pruning(folder, settings.keep, self.objective, mirror)
        make_policy = partial(stop_policy, settings.stop, self.objective, config, settings.ranks)
        self.stopping = JobStopper(make_policy, self.queue, self.running, self.objective)
        self.files, self.table = SummaryFiles(folder, self.objective), LiveTable(self.objective)
        self.rows, self.batches = earlier or [], 0
        for row in self.rows:
            if row.state == JobState.running:  # the earlier run was killed
                row.state = JobState.interrupted
                summary_files.take_end(row, folder / row.folder, self.objective)
                row.state = self.stopping.state_at_end if row.state == JobState.done else row.state
        self.picture: ForkedProcess | None = None
        self.stop_reason = ""
        self.polled = 0.0
        self.interrupts = Interrupts(self.interrupt_notice)
        try:
            self._bring_up(own_need.cluster, is_first=not earlier)
        except BaseException:  # Python would wait for the processes when it ends, and no launcher knows of them yet
            self.close()
            raise

    def _bring_up(self, own_cluster: str, is_first: bool) -> None:
        """Start what takes long while Hydra checks the jobs; of a sweep that is resumed, all jobs may be done."""
        connection.load()  # before the cluster's process is forked, which needs it, too
        if is_first:
            with held_back(SIGNALS):  # until `close` knows the process
                self.scheduler.bring_up(planned_job.first_need(self.queue.config).cluster or own_cluster)
        fork_client.release()  # the cluster's process has it; if there is none, it is not needed yet
        preload(planned_job.is_ours(self.queue.config))

    def run(
        self, job_overrides: Sequence[Sequence[str]], first: int, labels: Sequence[dict[str, str]]
    ) -> list[JobReturn]:
        forked.resume_garbage(searches=True)
        self.batches += 1
        known = len(self.queue.keys)
        jobs = [self.queue.add(overrides, first + index) for index, overrides in enumerate(job_overrides)]
        for job, own in zip(jobs, labels, strict=False):
            job.row.labels = own
        for row in self.rows if len(self.queue.keys) > known else ():
            if row.state != JobState.queued:
                summary_files.fill_row_from_folder(row, self.queue.keys, self.folder / row.folder)
        self.stopping.add(jobs)
        replaced = [id(job.earlier) for job in jobs]
        self.rows = [row for row in self.rows if id(row) not in replaced] + [job.row for job in jobs]
        self.pruning.update(self.rows)
        with self.interrupts.caught(), self.interrupts.deferred():
            try:
                self.run_queue()
                while not self.is_stopping() and self.stopping.end_batch():
                    self.run_queue()
            finally:
                self.end_batch()
        if self.interrupts.wanted:
            folder = typed("hydra.sweep.dir", self.shown_dir)
            raise Interrupted(f"{describe_counts(self.rows)}: go on with the same command and {folder}")
        return [self.result(job) for job in jobs]

    def end_batch(self) -> None:
        """Write what has become of the jobs, also if the user ends the sweep at once meanwhile."""
        try:
            self.end_all()
            self.pruning.finish(self.rows, lambda: 0.0 if self.interrupts.wanted else FINISH_S)
        finally:
            self.files.write(self.rows, now=True)
            self.table.close(self.rows, self.closing_lines if self.batches == 1 else [])

    @property
    def shown_dir(self) -> str:
        return shown_path(self.folder)

    # -- running jobs --------------------------------------------------------------------------------------

    def run_queue(self) -> None:
        while self.running or (self.queue and not self.is_stopping()):
            for job in self.scheduler.ready_jobs(self.is_stopping):
                self.start(job)
            if not self.queue and self.picture is None:  # while the last jobs run: matplotlib takes 0.4 s to import
                self.start_picture()
            is_busy = self.queue.compose_ahead()
            cluster = self.scheduler.cluster
            processes = [cluster.process] if cluster is not None and not cluster.is_gone else []
            wait_for_message(processes + [job.process for job in self.running], 0.0 if is_busy else MESSAGE_WAIT_S)
            for ended in [job for job in self.running if not job.process.receive()]:
                self.on_end(ended)
            self.poll()
            self.files.write(self.rows)
            self.table.show(self.rows)

    def is_stopping(self) -> bool:
        return bool(self.stop_reason) or self.interrupts.wanted

    def start(self, job: PlannedJob) -> None:
        self.stopping.before_start(job)
        job.row.state, job.row.message = JobState.running, ""
        waits = job.is_ours and job.need.cluster
        job.row.workers = 0 if waits else job.need.workers or 1  # without waiting for workers, it reports none
        with contextlib.suppress(OSError):
            (job.folder / "status.json").unlink(missing_ok=True)  # of an earlier run that was killed
        cluster = self.scheduler.cluster
        work = partial(run_planned_job, job, self.context, self.task, cluster.scheduler if cluster else None)
        process = ForkedProcess(lambda pipe: work(), job.folder / "logs" / "job.log")
        self.running.append(RunningJob(job, process))

    def on_end(self, job: RunningJob) -> None:
        self.running.remove(job)
        outcome = job.outcome(self.interrupts.wanted)
        row, ended = job.row, None
        row.wall_s, row.eta_s = job.wall_s, None
        row.state, row.message = outcome.state, outcome.message
        if job.planned.is_ours:
            ended = summary_files.read_summary(row, job.planned.folder, self.objective)
        if outcome.result is not None:
            job.planned.result = outcome.result
            if outcome.state == JobState.done:
                summary_files.take_value(row, outcome.result.return_value, self.objective)
                if ended == "paused":
                    row.state = JobState.paused
        if not self.is_stopping():
            self.stopping.on_end(job.planned)
        if row.state == JobState.failed and self.settings.fail_fast and not self.is_stopping():
            self.stop_all(f"job {row.number} failed ({row.message}), and hydra.launcher.fail_fast=true")
        if row.state in (JobState.done, JobState.stopped, JobState.failed):
            job.planned.config = DictConfig({})  # hundreds of them would fill the memory
        self.pruning.update(self.rows)

    # -- watching and stopping jobs ------------------------------------------------------------------------

    def poll(self) -> None:
        """Read the progress of the jobs, check their time limits, and stop all if the user wants to."""
        now = time.monotonic()
        if now - self.polled < POLL_S:
            return
        self.polled = now
        if not self.is_stopping():
            self.stopping.poll()
        if self.interrupts.wanted and not self.stop_reason:
            self.stop_all("interrupted")
        for job in self.running:
            if job.planned.is_ours:
                was_waiting = self.scheduler.cluster is not None and not job.row.workers
                summary_files.read_status(job.row, job.planned.folder, self.objective)
                if was_waiting:  # the time until it gets its workers does not count
                    job.begun = now
            job.row.wall_s = job.wall_s
            job.check_time(self.settings.job_timeout_s, now)

    def interrupt_notice(self) -> str:
        where = f"in {self.shown_dir}"
        if not self.running:
            return f"the tables of the jobs are written {where}. {SECOND}"
        return f"the jobs that run save a checkpoint at their next step, and no other begins, {where}. {SECOND}"

    def stop_all(self, reason: str) -> None:
        self.stop_reason = reason
        if not self.interrupts.wanted:  # otherwise the user has been told already
            log.warning("%s: the jobs that run are asked to end", reason)
        for job in self.running:
            job.process.signal(signal.SIGINT)

    def end_all(self) -> None:
        for job in self.running:
            job.row.state, job.row.message = JobState.interrupted, "ended at once"
            job.process.signal(signal.SIGINT)
        for job in self.running:
            job.process.end()
        self.running.clear()

    def close(self) -> None:
        self.end_all()
        if self.batches > 1:  # a sweeper may ask for a hundred batches
            self.table.close(self.rows, self.closing_lines)
        picture = self.picture or self.start_picture()
        try:
            with contextlib.suppress(OSError):  # it has ended
                picture.pipe.send_bytes(b"draw")
            self.scheduler.close_cluster()
            self.name_left()
            picture.process.join(DRAW_S)
        finally:  # also after Ctrl-C
            picture.end()
            self.locks.close()

    def name_left(self) -> None:
        """Name the interrupted jobs of an earlier run: a sweeper that draws jobs may not ask for one again."""
        if not self.batches or self.interrupts.wanted:
            return
        for row in self.queue.earlier:
            if row.state == JobState.interrupted:
                folder = self.folder / row.folder
                advice = f": go on with it by resume={shown_path(folder)}" if has_checkpoint(folder) else ""
                log.warning("job %d was interrupted, and the sweeper did not ask for it again%s", row.number, advice)

    def start_picture(self) -> ForkedProcess:
        self.picture = ForkedProcess(lambda pipe: draw_at_end(pipe, self.objective, self.folder))
        return self.picture

    # -- results -------------------------------------------------------------------------------------------

    @property
    def closing_lines(self) -> list[str]:
        failed = [f"job {row.number} failed: {row.message}" for row in self.rows if row.state == JobState.failed]
        return [*failed, self.closing_line]

    @property
    def closing_line(self) -> str:
        return f"{describe_counts(self.rows)}  ->  {self.shown_dir}/sweep.md"

    def result(self, job: PlannedJob) -> JobReturn:
        if job.is_ours and job.row.state not in (JobState.done, JobState.stopped, JobState.paused):
            return job.failed_return(SweepFailed(self.closing_line))
        reason = job.row.message or self.stop_reason
        unfinished = f"job {job.row.number} was not run to its end: {reason}"
        result = job.result or job.failed_return(SweepFailed(unfinished))
        return job.return_for_optuna(result, self.objective) if self.tells_optuna else result
