"""Takes over a job's status, summary and return value into its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddp_hydra.errors import ConfigError
from ddp_hydra.run_state import Status, Summary, decode
from ddp_hydra.sweep.rows import Objective, Row, State
from ddp_hydra.writers import run_dir


def read_status(row: Row, folder: Path, objective: Objective) -> None:
    """Take over the progress of a running job.

    Args:
        row: the job's row, changed in place.
        folder: its run directory.
        objective: the metric that jobs are compared by.
    """
    try:
        status = decode((folder / "status.json").read_bytes(), Status, folder / "status.json")
    except (OSError, ConfigError):
        return
    if status is None:  # a job that ends removes the file
        return
    row.step, row.total_steps, row.epoch, row.epochs = status.step, status.total_steps, status.epoch, status.epochs
    row.workers, row.eta_s = status.world_size or row.workers, status.eta_s
    _take_metrics(row, status.metrics, objective)


def read_summary(row: Row, folder: Path, objective: Objective) -> str | None:
    """Take over the summary of a job that has ended, and return its status; arguments as for `read_status`."""
    summary = _summary(row, folder) or Summary(status="")
    row.step = summary.steps
    if summary.status == "done" and row.total_steps is None:  # it ended before its status was ever read
        row.total_steps = row.step
    row.epoch = row.epochs if row.step == row.total_steps else None  # that of the last look may be of long before
    row.workers = summary.world_size or row.workers
    _take_metrics(row, summary.metrics, objective)
    if summary.status == "done" and summary.stopped_early:
        row.message = f"stopped early: {summary.stopped_early}"
    return summary.status


def take_end(row: Row, folder: Path, objective: Objective) -> None:
    """Take over that a job of ours is done or paused, if its process has written so after the last look at it."""
    summary = _summary(row, folder)
    if summary is not None and summary.status in ("done", "paused"):
        read_summary(row, folder, objective)
        row.state, row.value = State(summary.status), row.objective


def take_value(row: Row, value: Any, objective: Objective) -> None:
    """Take over the return value of the task."""
    row.value = plain_value(value)
    returned = number(row.value)
    if returned is not None:
        row.objective = row.metrics[objective.metric] = returned


def plain_value(value: Any) -> Any:
    """Return a value as JSON represents it; None if JSON cannot."""
    try:
        value = to_scalar(value)
        kept = json.loads(json.dumps(value, default=to_scalar))
    except (TypeError, ValueError, RecursionError, RuntimeError):
        return None
    return kept if kept == value or isinstance(value, tuple) else None


def to_scalar(value: Any) -> Any:
    """Return the number in a scalar or zero-dimensional array of numpy or torch; other values as they are."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def number(value: Any, kind: type = float) -> Any:
    """Return a number converted to `kind`; None for anything else."""
    return kind(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _take_metrics(row: Row, metrics: dict[str, float | None], objective: Objective) -> None:
    row.metrics |= metrics
    if row.metrics.get(objective.metric) is not None:
        row.objective = row.metrics[objective.metric]


def _summary(row: Row, folder: Path) -> Summary | None:
    """Return the summary of a job; None if it can't be read: its row says why."""
    try:
        return run_dir.read_summary(folder)
    except ConfigError as error:
        row.message = str(error)
        return None
