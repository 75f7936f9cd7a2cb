"""Give a job that was stopped its row and its result."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.job_returns import value_return
from ddp_hydra.sweep.planned_job import PlannedJob
from ddp_hydra.sweep.rows import State
from ddp_hydra.sweep.stopping.reports import Report
from ddp_hydra.writers.run_dir import read_summary, write_summary


def stop(job: PlannedJob, report: Report | None, message: str) -> None:
    """Let a job count as stopped at a report, whatever it has done since.

    Args:
        job: changed in place. It returns the report's value to the sweeper.
        report: the last that counts; None if it has none.
        message: for its row.
    """
    row = job.row
    row.state, row.message, row.eta_s = State.stopped, message, None
    row.total_steps = None  # only those jobs know it whose status was read in time, and tables are to be repeatable
    if report is not None:
        row.step, row.epoch, row.objective = report.step, report.epoch, report.value
        row.metrics, row.value = dict(report.metrics), report.value
    job.result = value_return(job)
    if job.is_ours:
        _note(job.folder, message)


def _note(run_dir: Path, message: str) -> None:
    """Say in summary.json that the run was stopped, for those who list runs."""
    summary = read_summary(run_dir)
    if summary:
        try:
            write_summary(run_dir, {**summary, "status": "stopped", "stopped": message})
        except ConfigError:
            return  # the sweep's own table says it, too


def set_length(job: PlannedJob, config: DictConfig) -> None:
    """Note in the row how many epochs a job of ours has.

    Args:
        job: changed in place.
        config: of the sweep, for a job that is not composed.
    """
    trainer = (job.config if job.is_composed else config).get("trainer")
    is_known = job.row.epochs is not None and not job.is_composed
    if job.is_ours and not is_known and trainer is not None and trainer.epochs is not None:
        job.row.epochs = float(trainer.epochs)


def place(job: PlannedJob, report: Report | None, count: int) -> str:
    """Return where a job was stopped, as "3 of 12 epochs".

    Args:
        job: the job.
        report: the last that counts.
        count: its number, from 1.
    """
    if report is not None and report.epoch is not None and job.row.epochs:
        return f"{report.epoch:g} of {job.row.epochs:g} epochs"
    if job.is_ours and report is not None and report.step is not None:
        return f"step {report.step}"
    return f"report {count}"
