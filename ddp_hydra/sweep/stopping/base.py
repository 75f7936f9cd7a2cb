"""Defines the calls of a sweep to a rule that stops its jobs; the base class stops none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace
from omegaconf import DictConfig

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.planned_job import PlannedJob
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import Objective, State
from ddp_hydra.sweep.stopping.reports import Report, saved_reports
from ddp_hydra.writers.run_dir import read_summary, write_summary

ENDS = {State.done: "done", State.failed: "failed", State.interrupted: "failed", State.stopped: "stopped"}
"""How a job has ended, in the words of the rules."""


class Stopping:
    """Stops no job.

    Args:
        queue: of the sweep.
        objective: of the sweep.
        config: of the sweep, without the swept overrides.

    Attributes:
        state_at_end: of a job that has ended well, before anything is decided about it.
        jobs: those that were taken over, by number.
        reports: what they have reported, by number.
    """

    state_at_end = State.done

    def __init__(self, queue: JobQueue, objective: Objective, config: DictConfig) -> None:
        self.queue, self.objective, self.config = queue, objective, config
        self.jobs: dict[int, PlannedJob] = {}
        self.reports: dict[int, list[Report]] = {}

    def add(self, jobs: Sequence[PlannedJob]) -> None:
        """Take over the jobs of a batch. Those that need not run are removed from the queue."""

    def before_start(self, job: PlannedJob) -> None:
        """Prepare a job that starts now."""

    def poll(self) -> None:
        """Read what running jobs have reported, and decide."""

    def on_end(self, job: PlannedJob) -> None:
        """Decide about a job whose process has ended; its row says how. Not called when the sweep is being stopped."""

    def end_batch(self) -> bool:
        """Settle the jobs of a batch when nothing is left to run; return whether some have to run on first."""
        return False

    def _taken_over(self, jobs: Sequence[PlannedJob]) -> Iterator[PlannedJob]:
        """Yield the jobs by number, each with what it has reported in an earlier run of the sweep."""
        for job in sorted(jobs, key=lambda job: job.row.number):
            number = job.row.number
            self.jobs[number], self.reports[number] = job, saved_reports(job, self.queue.folder, self.objective.metric)
            yield job

    def _values(self, number: int) -> list[float]:
        return [report.value for report in self.reports[number]]

    def _set_length(self, job: PlannedJob) -> None:
        """Note in the row how many epochs a job of ours has."""
        trainer = (job.config if job.is_composed else self.config).get("trainer")
        is_known = job.row.epochs is not None and not job.is_composed
        if job.is_ours and not is_known and trainer is not None and trainer.epochs is not None:
            job.row.epochs = float(trainer.epochs)

    def _place(self, job: PlannedJob, count: int) -> str:
        """Return where a job is stopped, as "3 of 12 epochs", by the number of its last report that counts, from 1."""
        self._set_length(job)
        report = self.reports[job.row.number][count - 1]
        if report.epoch is not None and job.row.epochs:
            return f"{report.epoch:g} of {job.row.epochs:g} epochs"
        if job.is_ours and report.step is not None:
            return f"step {report.step}"
        return f"report {count}"

    def _stop_at(self, job: PlannedJob, count: int, message: str) -> None:
        """Let a job count as stopped at a report, whatever it has done since.

        Args:
            job: changed in place. It returns the report's value to the sweeper.
            count: number of the report, from 1.
            message: for its row.
        """
        row, report = job.row, self.reports[job.row.number][count - 1]
        row.state, row.message, row.eta_s = State.stopped, message, None
        row.total_steps = None  # only those know it whose status was read in time, and tables are to be repeatable
        row.step, row.epoch, row.objective = report.step, report.epoch, report.value
        row.metrics, row.value = dict(report.metrics), report.value
        job.result = job.value_return()
        if job.is_ours:
            _note(job.folder, message)


def _note(run_dir: Path, message: str) -> None:
    """Say in summary.json that the run was stopped, for those who list runs."""
    with contextlib.suppress(ConfigError):  # the sweep's own table says it, too
        if (summary := read_summary(run_dir)) is not None:
            write_summary(run_dir, replace(summary, status="stopped", stopped=message))
