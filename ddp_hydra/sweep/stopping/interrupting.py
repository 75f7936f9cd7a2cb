"""Interrupts the jobs of a sweep that a rule stops."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence

from omegaconf import DictConfig

from ddp_hydra.sweep.planned_job import PlannedJob
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import Objective, State
from ddp_hydra.sweep.scheduler import STOP_S, RunningJob
from ddp_hydra.sweep.stopping.base import ENDS, Stopping
from ddp_hydra.sweep.stopping.decisions import Decisions, Rule, Stop
from ddp_hydra.sweep.stopping.reports import ReportFile

log = logging.getLogger(__name__)
WAITS = "ended; the jobs before it have to come as far, to decide whether it counts to its end"
_ENDS = {**ENDS, State.paused: "done"}  # by its own trainer.pause_after_validations


class Interrupting(Stopping):
    """Applies a rule to the jobs of a sweep.

    A job that has ended before all is decided about it is shown as paused until then: it may yet be stopped at an
    earlier report.

    Args:
        rule: judges the jobs.
        queue: see `Stopping`, as for `objective` and `config`.
        running: the jobs that have started.
    """

    state_at_end = State.paused

    def __init__(
        self, rule: Rule, queue: JobQueue, running: Sequence[RunningJob], objective: Objective, config: DictConfig
    ) -> None:
        super().__init__(queue, objective, config)
        self.decisions, self.running = Decisions(rule), running
        self.files: dict[int, ReportFile] = {}
        self.waiting: set[int] = set()
        self.stops: dict[int, Stop] = {}

    def add(self, jobs: Sequence[PlannedJob]) -> None:
        """Take over a batch; what jobs have reported in an earlier run of the sweep is decided upon at once."""
        for job in self._taken_over(jobs):
            number = job.row.number
            self.decisions.add(number, self._values(number), _ENDS.get(job.row.state, ""))
            if job.earlier is not None and job.row is not job.earlier and job.earlier.state == State.paused:
                self._take_ended(job)
            else:
                self._update(job, "")
        self._decide()

    def _take_ended(self, job: PlannedJob) -> None:
        """Take over a job that had ended when the sweep was killed, but had not been decided upon."""
        assert job.earlier is not None
        if job.earlier.value is None:
            return
        self.queue.remove(job)
        self.queue.keep_earlier(job)
        job.result = job.value_return()
        self.waiting.add(job.row.number)
        self._update(job, "done")

    def before_start(self, job: PlannedJob) -> None:
        """Read the reports of a job from now on."""
        self._set_length(job)
        self.files[job.row.number] = ReportFile(job.folder, self.objective.metric, job.is_ours)

    def poll(self) -> None:
        """Read what running jobs have reported, and decide."""
        for running in self.running:
            self._read(running.planned)
        for number, job in self.jobs.items():
            if job.row.state == State.failed and not self.decisions.trials[number].end:  # it failed before it began
                self._update(job, "failed")
        self._decide()

    def on_end(self, job: PlannedJob) -> None:
        """Decide about a job that has ended; it counts only up to the report at which it was stopped, if it was."""
        number = job.row.number
        self._read(job)
        if number in self.stops:
            self._stop(job, self.stops[number])
            return
        self._update(job, _ENDS.get(job.row.state, ""))
        if job.row.state == State.done:
            self.waiting.add(number)
            job.row.state, job.row.message = State.paused, WAITS
        self._decide()

    def _read(self, job: PlannedJob) -> None:
        """Read the new reports of a job that has started."""
        number = job.row.number
        if number not in self.stops and self.files[number].read():
            if len(self.files[number].reports) > len(self.reports[number]):
                self.reports[number] = list(self.files[number].reports)
            self._update(job, "")

    def _update(self, job: PlannedJob, end: str) -> None:
        number = job.row.number
        self.decisions.update(number, self._values(number), end, self._is_complete(job))

    def _is_complete(self, job: PlannedJob) -> bool:
        """Return whether the last report of a job of ours is that of the whole run."""
        trainer = (job.config if job.is_composed else self.config).get("trainer")
        reports = self.reports[job.row.number]
        if not job.is_ours or trainer is None or not reports:
            return False
        step, epoch = reports[-1].step or 0, reports[-1].epoch or 0
        return step >= (trainer.max_steps or step + 1) or epoch >= (trainer.epochs or epoch + 1)

    def _decide(self) -> None:
        for stop in self.decisions.decide():
            job = self.jobs[stop.number]
            self.stops[stop.number] = stop
            log.info("job %d is stopped at %s: %s", stop.number, self._place(job, stop.report), stop.reason)
            running = next((one for one in self.running if one.planned is job), None)
            if running is None:
                self._stop(job, stop)
                continue
            running.process.signal(signal.SIGINT)
            if not job.is_ours:  # it may not heed the signal, and has nothing to save
                running.kill_at = time.monotonic() + STOP_S
        for number in [number for number in self.waiting if self.decisions.is_settled(number)]:
            self.waiting.remove(number)
            if number not in self.stops:
                self.jobs[number].row.state, self.jobs[number].row.message = State.done, ""

    def _stop(self, job: PlannedJob, stop: Stop) -> None:
        if job in self.queue.jobs:
            self.queue.remove(job)
            self.queue.keep_earlier(job)
        self._stop_at(job, stop.report, f"stopped at {self._place(job, stop.report)}: {stop.reason}")
