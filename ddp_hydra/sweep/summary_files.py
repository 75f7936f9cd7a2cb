"""Fills the rows of jobs from their files and configs, and writes the files of a sweep.

These are sweep.json to resume it, sweep.csv and sweep.md to read, seeds.csv for a sweep that repeats seeds, and, once
there are curves, the columns of TensorBoard's HParams tab.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddp_hydra.checked import finite_number
from ddp_hydra.config import redact
from ddp_hydra.config.checkpoint_config import as_typed
from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.run_state import Status, Summary, decode
from ddp_hydra.storage.files import remove_parts, write_atomic
from ddp_hydra.sweep.rows import JobRow, JobState, SweepContent, SweepObjective, typed
from ddp_hydra.sweep.tables import SeedSummary, csv_text, markdown_text, repeated, seeds_csv_text
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
    if (returned := finite_number(row.value)) is not None:
        row.objective = row.metrics[objective.metric] = returned
    for place, one in enumerate(row.value if isinstance(row.value, list) else ()):  # several objectives
        if (returned := finite_number(one)) is not None:
            row.metrics[f"{objective.metric}[{place}]"] = returned


def plain_value(value: Any) -> Any:
    try:
        value = to_scalar(value)
        kept = json.loads(json.dumps(value, default=to_scalar))
    except (TypeError, ValueError, RecursionError, RuntimeError):
        return None
    return kept if kept == value or isinstance(value, tuple) else None


def to_scalar(value: Any) -> Any:
    """Return the number in a scalar or zero-dimensional array of numpy or torch; other values as they are."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _take_metrics(row: JobRow, metrics: dict[str, float | None], objective: SweepObjective) -> None:
    row.metrics |= metrics
    row.objective = row.metrics.get(objective.metric)  # None for one that was not finite


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
    if key in choices:
        option = choices[key]
        return None if option is None else as_typed(option)
    try:
        value = OmegaConf.select(config, key, default=_ABSENT)
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value
    except (OmegaConfBaseException, ValueError):
        return None
    if value is _ABSENT or isinstance(value, DictConfig):
        return None
    return redact.HIDDEN if redact.is_secret(key, value) else as_typed(value)


log = logging.getLogger(__name__)
_PAUSE_S = 1.0
"""Minimum seconds between two writes."""
_PAUSE_FACTOR = 20
"""Minimum pause after a write, as a multiple of its CPU time: so writing takes at most 1/20 of the time."""
_ADVICE = "move it away to begin the sweep anew, or give another folder with hydra.sweep.dir=<folder>"


class SummaryFiles:
    """Keeps the files of a sweep up to date.

    A full or missing disk does not end the sweep: a warning is logged once, and later calls try again.
    """

    def __init__(self, folder: Path, objective: SweepObjective) -> None:
        self.folder, self.objective = folder, objective
        self._written: dict[str, object] = {}
        self._wait_until = 0.0
        self._warned = False
        with contextlib.suppress(OSError):
            remove_parts(folder)  # of a sweep that was killed

    def write(self, rows: Sequence[JobRow], now: bool = False) -> None:
        if time.monotonic() < self._wait_until and not now:
            return
        begin = time.process_time()
        try:
            over_seeds = repeated(rows, self.objective)
            self._update("sweep.json", json_text(rows, self.objective, over_seeds), durable=True)
            self._update("sweep.csv", csv_text(rows, self.objective), durable=False)
            self._update("sweep.md", markdown_text(rows, self.objective, over_seeds), durable=False)
            if over_seeds:
                self._update("seeds.csv", seeds_csv_text(over_seeds, self.objective), durable=False)
            self._update_columns(rows)
        except RecordError as error:
            if not self._warned:
                log.warning("the sweep goes on, but its overview is out of date: %s", error)
            self._warned = True
        spent_s = time.process_time() - begin
        self._wait_until = time.monotonic() + max(_PAUSE_S, _PAUSE_FACTOR * spent_s)

    def _update(self, name: str, text: str, durable: bool) -> None:
        """Write a file that has changed; only one that can't be made from the others has to survive a power cut."""
        if self._written.get(name) != text:
            write_atomic(self.folder / name, text.encode(errors="replace"), durable=durable)
            self._written[name] = text

    def _update_columns(self, rows: Sequence[JobRow]) -> None:
        """Write the HParams tab's columns once metrics are known, because TensorBoard keeps the first ones it reads."""
        names = {name for row in rows for name in row.metrics}
        others = sorted(name for name in names if name.startswith(("val/", "train/"))) or sorted(names)
        wanted = list(dict.fromkeys([self.objective.metric, *others])), [row.overrides for row in rows]
        if not names or self._written.get("columns") == wanted:
            return
        if any(os.path.isdir(self.folder / row.folder / "tensorboard") for row in rows if row.metrics):  # noqa: PTH112
            from ddp_hydra.writers import tensorboard

            tensorboard.write_experiment(self.folder, wanted[1], wanted[0])
            self._written["columns"] = wanted[0], [list(overrides) for overrides in wanted[1]]


def json_text(rows: Iterable[JobRow], objective: SweepObjective, over_seeds: Sequence[SeedSummary] = ()) -> str:
    lines = ",\n".join(_strict({field.name: getattr(row, field.name) for field in fields(JobRow)}) for row in rows)
    head = f'"version": 1, "objective": {_strict(vars(objective))}'
    configs = ",\n".join(_strict(vars(entry)) for entry in over_seeds)
    rest = f', "seeds": [\n{configs}\n]' if over_seeds else ""
    return f'{{{head}, "jobs": [\n{lines}\n]{rest}}}\n'


def read(folder: Path) -> list[JobRow]:
    path = folder / "sweep.json"
    try:
        content = json.loads(path.read_bytes().decode(), parse_constant=_no_constant)
        rows = msgspec.convert(content, SweepContent).jobs
        if len({row.number for row in rows}) < len(rows):
            raise ValueError("two jobs have the same number")
        return rows
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {_ADVICE}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not what a sweep writes ({error}): {_ADVICE}") from None


def _strict(value: object) -> str:
    return json.dumps(_finite(value), allow_nan=False, default=str)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value.value if isinstance(value, JobState) else value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
