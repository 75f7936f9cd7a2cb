"""What is known of each job of a sweep, and which of them is the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

DATA_KEYS = frozenset(
    {"data", "experiment", "task"}
    | {
        f"data.{name}"
        for name in (
            "_target_", "bucket", "train_prefix", "val_prefix", "table", "val_table", "index", "val_index", "source",
            "base", "train", "val", "endpoint_url",
        )
    }
)  # fmt: skip
"""Overrides that choose a data set; the other keys of `data` say how it is read."""


class State(Enum):
    """Where a job is."""

    queued = "queued"
    running = "running"
    done = "done"
    failed = "failed"
    interrupted = "interrupted"

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come of it in this sweep."""
        return self in (State.done, State.failed, State.interrupted)


@dataclass
class Row:
    """One job.

    Args:
        number: Hydra's `hydra.job.num`.
        overrides: what makes the job, as typed.
        folder: its run directory, in the sweep's folder.
        state: where it is.
        objective: the last value of the metric to go by; None while there is none.
        metrics: the last value of each metric.
        step: the last step that was reported.
        total_steps: of the whole job; None where it is not known.
        epoch: the epoch of `step`.
        epochs: of the whole job; None where it is not known.
        workers: how many it has; 0 while it waits for them.
        wall_s: how long it has taken.
        eta_s: how long it is likely to take yet; None where it is not known.
        message: why it failed, or ended early: one line.
        value: what the task returned, where that is a number, a text, or a list of such.
    """

    number: int
    overrides: list[str]
    folder: str
    state: State = State.queued
    objective: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    epochs: float | None = None
    workers: int = 0
    wall_s: float = 0.0
    eta_s: float | None = None
    message: str = ""
    value: object = None

    @property
    def shown_state(self) -> str:
        """Name its state for a person: one that runs may still wait for workers."""
        return "waiting" if self.state == State.running and not self.workers else self.state.value


@dataclass(frozen=True)
class Objective:
    """What jobs are compared by.

    Args:
        metric: its name.
        maximize: whether more is better; None where nobody has said it.
    """

    metric: str
    maximize: bool | None

    @property
    def better(self) -> str:
        """Say which values are better."""
        return "higher is better" if self.maximize else "lower is better"

    def ranks(self, rows: Sequence[Row]) -> bool:
        """Return whether one of these jobs can be called the best."""
        return self.maximize is not None and len(set(data_of(rows).values())) < 2


def best_first(rows: Iterable[Row], objective: Objective | None) -> list[Row]:
    """Order jobs: those with an objective by it, then the others by number; failed ones last.

    Jobs with other data stand apart: a number that was measured on one data set says nothing of another.

    Args:
        rows: of a sweep.
        objective: None, or one of which nobody has said what is better: all by number.
    """
    rows = list(rows)
    data = data_of(rows)
    places = {value: place for place, value in enumerate(dict.fromkeys(data.values()))}

    def key(row: Row) -> tuple[bool, int, bool, float, int]:
        failed = row.state == State.failed
        value = row.objective
        if objective is None or objective.maximize is None or failed:
            return failed, 0, True, 0.0, row.number
        place = places[data[row.number]]
        if value is None or math.isnan(value):
            return False, place, True, 0.0, row.number
        return False, place, False, -value if objective.maximize else value, row.number

    return sorted(rows, key=key)


def data_of(rows: Sequence[Row]) -> dict[int, tuple[tuple[str, str], ...]]:
    """Return, by number, the swept keys and values that choose what a job learns from and is measured on."""
    return {
        number: tuple((key, value) for key, value in values.items() if key in DATA_KEYS)
        for number, values in swept(rows).items()
    }


def swept(rows: Sequence[Row]) -> dict[int, dict[str, str]]:
    """What tells the jobs apart: by number, the overrides that are not the same in all of them.

    Args:
        rows: of a sweep. Of one alone, all overrides are returned.
    """
    given = {row.number: dict(_split(override) for override in row.overrides) for row in rows}
    keys = {key: None for values in given.values() for key in values}
    if len(rows) > 1:
        keys = {key: None for key in keys if len({values.get(key) for values in given.values()}) > 1}
    return {number: {key: values[key] for key in keys if key in values} for number, values in given.items()}


def counted(rows: Iterable[Row]) -> str:
    """For example "12 jobs: 9 done, 3 failed"."""
    rows = list(rows)
    names = [row.shown_state for row in rows]
    parts = []
    for name in ("done", "failed", "interrupted", "running", "waiting", "queued"):
        if number := names.count(name):
            parts.append(f"{number} {name}")
    return f"{len(rows)} job{'s' if len(rows) != 1 else ''}: {', '.join(parts)}"


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value
