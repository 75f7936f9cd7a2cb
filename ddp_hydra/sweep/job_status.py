"""Takes over a job's status, summary and return value into its row."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ddp_hydra.sweep.rows import Objective, Row, State
from ddp_hydra.writers.run_dir import json_object


def read_status(row: Row, folder: Path, objective: Objective) -> None:
    """Take over the progress of a running job.

    Args:
        row: the job's row, changed in place.
        folder: its run directory.
        objective: the metric that jobs are compared by.
    """
    status = _read(folder / "status.json")
    if not status:  # a job that ends removes the file
        return
    row.step, row.total_steps = number(status.get("step"), int), number(status.get("total_steps"), int)
    row.epoch, row.epochs = number(status.get("epoch")), number(status.get("epochs"))
    row.workers = number(status.get("world_size"), int) or row.workers
    row.eta_s = number(status.get("eta_s"))
    _take_metrics(row, status.get("metrics"), objective)


def read_summary(row: Row, folder: Path, objective: Objective) -> object:
    """Take over the summary of a job that has ended, and return its status; arguments as for `read_status`."""
    summary = _read(folder / "summary.json")
    row.step = number(summary.get("steps"), int)
    if summary.get("status") == "done" and row.total_steps is None:  # it ended before its status was ever read
        row.total_steps = row.step
    row.epoch = row.epochs if row.step == row.total_steps else None  # that of the last look may be of long before
    row.workers = number(summary.get("world_size"), int) or row.workers
    _take_metrics(row, summary.get("metrics"), objective)
    return summary.get("status")


def take_end(row: Row, folder: Path, objective: Objective) -> None:
    """Take over that a job of ours is done or paused, if its process has written so after the last look at it."""
    status = _read(folder / "summary.json").get("status")
    if status in ("done", "paused"):
        read_summary(row, folder, objective)
        row.state, row.value = State(status), row.objective


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


def _take_metrics(row: Row, metrics: Any, objective: Objective) -> None:
    if isinstance(metrics, dict):
        row.metrics |= {str(name): number(value) for name, value in metrics.items()}
        if row.metrics.get(objective.metric) is not None:
            row.objective = row.metrics[objective.metric]


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return json_object(path.read_bytes())
    return {}
