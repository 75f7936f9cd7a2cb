"""Stops the jobs of a sweep early, and lets paused ones go on: applies a policy of `stop_rules` to what jobs report.

A job reports by the lines of its metrics.jsonl that have the metric of the objective.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from omegaconf import open_dict

from ddp_hydra.checked import finite_number
from ddp_hydra.errors import ConfigError
from ddp_hydra.job.run_dir import saved_step
from ddp_hydra.sweep import planned_job
from ddp_hydra.sweep.planned_job import PlannedJob
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import VALUE, JobRow, JobState, SweepObjective, data_of, score
from ddp_hydra.sweep.scheduler import STOP_S, RunningJob
from ddp_hydra.sweep.stop_rules import StopPolicy, Verdict
from ddp_hydra.writers.run_dir import json_object, read_summary, write_summary

log = logging.getLogger(__name__)
WAITS = "ended; the jobs before it have to come as far, to decide whether it counts to its end"
PAUSES_ITSELF = "asha and hyperband pause jobs: leave out trainer.pause_after_validations and hydra/sweeper=pbt"
_ENDS = {JobState.done: "done", JobState.failed: "failed", JobState.interrupted: "failed", JobState.stopped: "stopped"}
"""The end of a job, in the words of the policies."""


@dataclass(frozen=True)
class Report:
    """One reported value.

    Args:
        value: of the objective; NaN if it was not finite.
        step: None if the app gives none.
        metrics: the last value of each metric up to here.
    """

    value: float
    step: int | None
    epoch: float | None
    metrics: dict[str, float | None]


class ReportFile:
    """Reads a metrics.jsonl while it grows.

    A job that starts again from a checkpoint removes the lines after it and writes them again, with the same values.
    They are not counted twice.

    Args:
        run_dir: of the job.
        metric: of the objective.
        is_ours: the job's config is one of ours: then what it reports before its first step does not count.
    """

    def __init__(self, run_dir: Path, metric: str, is_ours: bool = False) -> None:
        self.is_ours = is_ours
        self.path, self.metric = run_dir / "metrics.jsonl", metric
        self.reports: list[Report] = []
        self._metrics: dict[str, float | None] = {}
        self._known: tuple[int, int] = (0, 0)
        self._offset = 0

    def read(self, last_step: int | None = None) -> bool:
        """Read the new lines, up to a step; return whether there are new reports."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._known[0] or found.st_size < self._offset:
                    self._offset, self._metrics = 0, {}
                if (found.st_ino, found.st_size) == self._known:
                    return False
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return False
        self._known = found.st_ino, found.st_size
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        before = len(self.reports)
        for line in whole.splitlines():
            self._take(line, last_step)
        return len(self.reports) > before

    def _take(self, line: bytes, last_step: int | None) -> None:
        found = json_object(line)
        at, epoch = finite_number(found.get("step")), finite_number(found.get("epoch"))
        step = None if at is None else int(at)
        if "rank" in found or (self.is_ours and step == 0):  # of another rank than 0, or by trainer.validate_first
            return
        if last_step is not None and step is not None and step > last_step:
            return
        own = {"time", "attempt", "step", "epoch", "samples"}
        self._metrics |= {str(name): finite_number(value) for name, value in found.items() if name not in own}
        last = self.reports[-1].step if self.reports else None
        is_known = step is not None and last is not None and step <= last
        if self.metric in found and not is_known:
            value = finite_number(found[self.metric])
            self.reports.append(Report(math.nan if value is None else value, step, epoch, dict(self._metrics)))


class JobStopper:
    """Reads what the jobs of a sweep report, lets a policy decide, and does what it has decided.

    A job that has ended before all is decided about it is shown as paused until then: it may yet be stopped at an
    earlier report.

    Args:
        make_policy: returns the policy that decides about jobs with the same data; None: no job is stopped.
        queue: of the sweep; jobs that go on are put at its front.
        running: the jobs that have started.

    Attributes:
        state_at_end: of a job that has ended well, before anything is decided about it.

    Raises:
        ConfigError: the jobs pause by themselves, and the policy pauses them, too.
    """

    def __init__(
        self,
        make_policy: Callable[[], StopPolicy | None],
        queue: JobQueue,
        running: Sequence[RunningJob],
        objective: SweepObjective,
    ) -> None:
        self.make_policy, self.queue, self.running, self.objective = make_policy, queue, running, objective
        self.config, policy = queue.config, make_policy()
        self.is_on, self.pauses = policy is not None, policy is not None and policy.pauses
        if self.pauses and self.config.trainer.pause_after_validations is not None:
            raise ConfigError(PAUSES_ITSELF)
        self.is_ours = planned_job.is_ours(self.config)
        self.state_at_end = JobState.paused if self.is_on and not self.pauses else JobState.done
        self.policies: dict[object, StopPolicy] = {}
        self.policy_of: dict[int, StopPolicy] = {}
        self.jobs: dict[int, PlannedJob] = {}
        self.reports: dict[int, list[Report]] = {}
        self.files: dict[int, ReportFile] = {}
        self.waiting: set[int] = set()
        self.stops: dict[int, Verdict] = {}

    def add(self, jobs: Sequence[PlannedJob]) -> None:
        if not self.is_on:
            return
        if self.pauses and any("pause_after_validations" in override for job in jobs for override in job.overrides):
            raise ConfigError(PAUSES_ITSELF)
        for job in sorted(jobs, key=lambda job: job.row.number):
            number, earlier = job.row.number, job.earlier
            self.jobs[number], self.reports[number] = job, self._saved_reports(job)
            data = data_of([job.row], self.objective)[number]
            policy = self.policies.get(data) or self.make_policy()
            assert policy is not None
            self.policies[data] = self.policy_of[number] = policy
            policy.add(number, self._values(number), self._end_of(job))
            if earlier is None or self.pauses or job not in self.queue.jobs:
                continue
            if earlier.state == JobState.paused and earlier.value is not None:  # it had ended, but was not decided upon
                self._take_from_queue(job)
                self.waiting.add(number)
                self._update(job, "done")
            else:
                self._update(job, "")
        self._decide()
        for job in jobs if self.pauses else ():
            if job.row.state not in _ENDS and not self.policy_of[job.row.number].must_run(job.row.number):
                self._take_from_queue(job)

    def before_start(self, job: PlannedJob) -> None:
        """Read the reports of a job from now on, and tell it where to pause; one that has paused resumes."""
        if not self.is_on:
            return
        if (goal := self.policy_of[job.row.number].goal(job.row.number)) is not None:
            with open_dict(job.config):
                job.config.trainer.pause_after_validations = goal
            if job.row.state == JobState.paused:
                planned_job.resume(job, job.row.wall_s)
        self._set_length(job)
        self.files[job.row.number] = ReportFile(job.folder, self.objective.metric, job.is_ours)

    def poll(self) -> None:
        for running in self.running if self.is_on and not self.pauses else ():
            self._read(running.planned)
        for number, job in self.jobs.items():
            # It failed before it began.
            if job.row.state == JobState.failed and not self.policy_of[number].trials[number].end:
                self.queue.remove(job)
                self._update(job, "failed")
        self._decide()

    def on_end(self, job: PlannedJob) -> None:
        """Decide about a job whose process has ended; it counts only up to the report at which it was stopped, if any.

        Its row says how it has ended. Not called when the sweep is being stopped.
        """
        if not self.is_on:
            return
        number = job.row.number
        self._read(job)
        if number in self.stops:
            self._stop(job, self.stops[number])
            return
        if job.row.state == JobState.done and not job.is_ours:
            self._take_report(job.row)
        self._update(job, self._end_of(job))
        if job.row.state == JobState.done and not self.pauses:
            self.waiting.add(number)
            job.row.state, job.row.message = JobState.paused, WAITS
        self._decide()

    def _take_report(self, row: JobRow) -> None:
        """Let a task of another app be compared by its last report, as a stopped one is; the sweeper has its value."""
        metric = self.objective.metric
        if not self.reports[row.number]:
            log.warning("job %d is compared by its value: it reported no %s (objective.metric)", row.number, metric)
            return
        last = self.reports[row.number][-1]
        row.metrics, row.objective = {VALUE: row.objective, **last.metrics}, finite_number(last.value)

    def end_batch(self) -> bool:
        """Settle the jobs of a batch when nothing is left to run; return whether some have to run on first."""
        while verdicts := [verdict for policy in self.policies.values() for verdict in policy.finish()]:
            for verdict in verdicts:
                self._apply(verdict)
            if self.queue:
                return True
        return False

    def _take_from_queue(self, job: PlannedJob) -> None:
        """Let a job that has reports, and so an earlier run, stay as it was there."""
        self.queue.remove(job)
        self.queue.keep_earlier(job)
        job.row.state, job.result = JobState.paused, job.value_return()

    def _saved_reports(self, job: PlannedJob) -> list[Report]:
        """Return what a job reported in an earlier run of the sweep: up to its last checkpoint, unless it had ended."""
        if job.earlier is None:
            return []
        run_dir = self.queue.folder / job.earlier.folder
        file = ReportFile(run_dir, self.objective.metric, job.is_ours)
        if job.row.state in (JobState.done, JobState.failed) or job.earlier.state == JobState.paused:
            file.read()
        else:
            step = job.row.step if job.row.state == JobState.stopped else saved_step(run_dir)
            file.read(-1 if step is None else step)
        return file.reports

    def _end_of(self, job: PlannedJob) -> str:
        if job.row.state == JobState.paused and not self.pauses:
            return "done"  # by its own trainer.pause_after_validations
        return _ENDS.get(job.row.state, "")

    def _trainer(self, job: PlannedJob) -> Any:
        return (job.config if job.is_composed else self.config).get("trainer")

    def _set_length(self, job: PlannedJob) -> None:
        is_known = job.row.epochs is not None and not job.is_composed
        if job.is_ours and not is_known and (trainer := self._trainer(job)) is not None and trainer.epochs is not None:
            job.row.epochs = float(trainer.epochs)

    def _describe(self, job: PlannedJob, count: int) -> str:
        """Return where a job is stopped, as "3 of 12 epochs", by the number of its last report that counts, from 1."""
        self._set_length(job)
        report = self.reports[job.row.number][count - 1]
        if report.epoch is not None and job.row.epochs:
            return f"{report.epoch:g} of {job.row.epochs:g} epochs"
        return f"step {report.step}" if job.is_ours and report.step is not None else f"report {count}"

    def _values(self, number: int) -> list[float]:
        return [report.value for report in self.reports[number]]

    def _read(self, job: PlannedJob) -> None:
        number = job.row.number
        if number not in self.stops and self.files[number].read():
            if len(self.files[number].reports) > len(self.reports[number]):
                self.reports[number] = list(self.files[number].reports)
            self._update(job, "")

    def _update(self, job: PlannedJob, end: str) -> None:
        number = job.row.number
        self.policy_of[number].update(number, self._values(number), end, self._is_complete(job))

    def _is_complete(self, job: PlannedJob) -> bool:
        trainer, reports = self._trainer(job), self.reports[job.row.number]
        if not self.is_ours or trainer is None or not reports:
            return False
        step, epoch = reports[-1].step or 0, reports[-1].epoch or 0
        return step >= (trainer.max_steps or step + 1) or epoch >= (trainer.epochs or epoch + 1)

    def _decide(self) -> None:
        for verdict in [verdict for policy in self.policies.values() for verdict in policy.decide()]:
            self._apply(verdict)
        for number in [number for number in self.waiting if self.policy_of[number].is_settled(number)]:
            self.waiting.remove(number)
            if number not in self.stops:
                self.jobs[number].row.state, self.jobs[number].row.message = JobState.done, ""

    def _apply(self, verdict: Verdict) -> None:
        job = self.jobs[verdict.number]
        if verdict.goes_on:
            if self.policy_of[verdict.number].must_run(verdict.number):
                self.queue.put_first(job, verdict.report)
                log.info("job %d goes on to report %d: %s", verdict.number, verdict.report, verdict.reason)
            return
        self.stops[verdict.number] = verdict
        log.info("job %d is stopped at %s: %s", verdict.number, self._describe(job, verdict.report), verdict.reason)
        running = next((one for one in self.running if one.planned is job), None)
        if running is None:
            self._stop(job, verdict)
            return
        running.process.signal(signal.SIGINT)
        if not job.is_ours:  # it may not heed the signal, and has nothing to save
            running.kill_at = time.monotonic() + STOP_S

    def _stop(self, job: PlannedJob, verdict: Verdict) -> None:
        """Let a job count as stopped at a report, whatever it has done since; its sweeper gets the report's value."""
        if job in self.queue.jobs:
            self._take_from_queue(job)
        message = f"stopped at {self._describe(job, verdict.report)}: {verdict.reason}"
        row, report = job.row, self.reports[job.row.number][verdict.report - 1]
        row.state, row.message, row.eta_s = JobState.stopped, message, None
        row.total_steps = None  # only known where the status was read in time, and tables are to be repeatable
        row.step, row.epoch, row.objective = report.step, report.epoch, finite_number(report.value)
        row.metrics, row.value = dict(report.metrics), report.value
        job.result = job.value_return()
        if job.is_ours:
            reported = [finite_number(one.value) for one in self.reports[row.number][: verdict.report]]
            row.best = max(reported, key=lambda value: score(value, self.objective.maximize))
            with contextlib.suppress(ConfigError):  # the sweep's own table says it, too
                if (summary := read_summary(job.folder)) is not None:
                    write_summary(job.folder, replace(summary, status="stopped", stopped=message))
