"""Fills the rows of jobs: with status, summary and return value, and with what only other jobs of the sweep give."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddp_hydra.config import redact
from ddp_hydra.config.checkpoint_config import as_typed
from ddp_hydra.errors import ConfigError
from ddp_hydra.run_state import Status, Summary, decode
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective, typed
from ddp_hydra.writers import run_dir


def read_status(row: JobRow, folder: Path, objective: SweepObjective) -> None:
    try:
        status = decode((folder / "status.json").read_bytes(), Status, folder / "status.json")
    except (OSError, ConfigError):
        return
    if status is None:  # a job that ends removes the file
        return
    row.step, row.total_steps, row.epoch, row.epochs = status.step, status.total_steps, status.epoch, status.epochs
    row.workers, row.eta_s = status.world_size or row.workers, status.eta_s
    _take_metrics(row, status.metrics, objective)


def read_summary(row: JobRow, folder: Path, objective: SweepObjective) -> str | None:
    summary = _summary(row, folder) or Summary(status="")
    row.step = summary.steps
    if summary.status == "done" and row.total_steps is None:  # it ended before its status was ever read
        row.total_steps = row.step
    row.epoch = row.epochs if row.step == row.total_steps else None  # the epoch read last may be outdated
    row.workers = summary.world_size or row.workers
    _take_metrics(row, summary.metrics, objective)
    row.best = summary.best.value if summary.best is not None else None
    if summary.status == "done" and summary.stopped_early:
        row.message = f"stopped early: {summary.stopped_early}"
    return summary.status


def take_end(row: JobRow, folder: Path, objective: SweepObjective) -> None:
    """Take over that a job of ours is done or paused, if its process has written so after the last look at it."""
    summary = _summary(row, folder)
    if summary is not None and summary.status in ("done", "paused"):
        read_summary(row, folder, objective)
        row.state, row.value = JobState(summary.status), row.objective


def take_value(row: JobRow, value: Any, objective: SweepObjective) -> None:
    row.value = plain_value(value)
    returned = as_number(row.value)
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


def as_number(value: Any, kind: type = float) -> Any:
    return kind(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _take_metrics(row: JobRow, metrics: dict[str, float | None], objective: SweepObjective) -> None:
    row.metrics |= metrics
    if row.metrics.get(objective.metric) is not None:
        row.objective = row.metrics[objective.metric]


def _summary(row: JobRow, folder: Path) -> Summary | None:
    try:
        return run_dir.read_summary(folder)
    except ConfigError as error:
        row.message = str(error)
        return None


_ABSENT = object()


def fill_row(row: JobRow, keys: Iterable[str], config: DictConfig, choices: Mapping[str, Any]) -> None:
    """Fill in the values of the keys that a job does not give itself, from its config and choices of groups."""
    own = typed(row)
    for key in keys:
        if key not in own and key not in row.filled and (value := _value_in_config(key, config, choices)) is not None:
            row.filled[key] = value


def fill_row_from_folder(row: JobRow, keys: Iterable[str], folder: Path) -> None:
    """Do the same for a job that has started, from what Hydra has saved of it."""
    own = typed(row)
    if all(key in own or key in row.filled for key in keys):
        return
    with contextlib.suppress(OSError, YAMLError, OmegaConfBaseException, ValueError):
        config = OmegaConf.load(folder / ".hydra" / "config.yaml")
        hydra = OmegaConf.load(folder / ".hydra" / "hydra.yaml")
        choices = OmegaConf.select(hydra, "hydra.runtime.choices")
        if isinstance(config, DictConfig):
            fill_row(row, keys, config, choices if isinstance(choices, DictConfig) else {})


def _value_in_config(key: str, config: DictConfig, choices: Mapping[str, Any]) -> str | None:
    """Return a value as a user would type it; None if there is none, or it is a part of the config."""
    if redact.named_secret(key):
        return redact.HIDDEN
    if key in choices:
        option = choices[key]
        return None if option is None else as_typed(option)
    try:
        value = OmegaConf.select(config, key, default=_ABSENT)
    except (OmegaConfBaseException, ValueError):
        return None
    if value is _ABSENT or isinstance(value, DictConfig):
        return None
    return as_typed(value)
