"""Writes the files of a sweep: sweep.json to resume it, sweep.csv and sweep.md to read.

Also write seeds.csv for a sweep that repeats seeds, and, once there are curves, the columns of TensorBoard's HParams
tab.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.storage.files import remove_parts, write_atomic, writing
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective
from ddp_hydra.sweep.tables import SeedSummary, csv_text, markdown_text, repeated, seeds_csv_text

log = logging.getLogger(__name__)
_VERSION = 1
_PAUSE_S = 1.0
"""Minimum seconds between two writes."""
_PAUSE_FACTOR = 20
"""Minimum pause after a write, as a multiple of its CPU time: so writing takes at most 1/20 of the time."""
_ADVICE = "move it away to begin the sweep anew, or give another folder with hydra.sweep.dir=<folder>"


class _Content(msgspec.Struct):
    """What is read of sweep.json."""

    version: Literal[1]
    jobs: list[JobRow]


class SummaryFiles:
    """Keeps the files of a sweep up to date.

    A full or missing disk does not end the sweep: a warning is logged once, and later calls try again.

    Args:
        folder: of the sweep; made if it is missing.
        objective: the metric that jobs are compared by.
    """

    def __init__(self, folder: Path, objective: SweepObjective) -> None:
        self.folder, self.objective = folder, objective
        self._written: dict[str, object] = {}
        self._is_open = False
        self._wait_until = 0.0
        self._warned = False

    def write(self, rows: Sequence[JobRow], now: bool = False) -> None:
        if time.monotonic() < self._wait_until and not now:
            return
        begin = time.process_time()
        try:
            if not self._is_open:
                with writing(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                    remove_parts(self.folder)
                self._is_open = True
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
        if any(self._has_curves(row) for row in rows if row.metrics):
            from ddp_hydra.writers import hparams

            hparams.write_experiment(self.folder, wanted[1], wanted[0])
            self._written["columns"] = wanted[0], [list(overrides) for overrides in wanted[1]]

    def _has_curves(self, row: JobRow) -> bool:
        try:
            return (self.folder / row.folder / "tensorboard").is_dir()
        except (OSError, ValueError):  # not a valid folder name
            return False


def json_text(rows: Iterable[JobRow], objective: SweepObjective, over_seeds: Sequence[SeedSummary] = ()) -> str:
    lines = ",\n".join(_strict({field.name: getattr(row, field.name) for field in fields(JobRow)}) for row in rows)
    head = f'"version": {_VERSION}, "objective": {_strict(vars(objective))}'
    configs = ",\n".join(_strict(vars(entry)) for entry in over_seeds)
    rest = f', "seeds": [\n{configs}\n]' if over_seeds else ""
    return f'{{{head}, "jobs": [\n{lines}\n]{rest}}}\n'


def read(folder: Path) -> list[JobRow]:
    path = folder / "sweep.json"
    try:
        content = json.loads(path.read_bytes().decode(), parse_constant=_no_constant)
        rows = msgspec.convert(content, _Content).jobs
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
