"""What is known of each job of a sweep, and which of them is the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum


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


@dataclass(frozen=True)
class Objective:
    """What jobs are compared by.

    Args:
        metric: its name.
        maximize: whether more is better.
    """

    metric: str
    maximize: bool


def best_first(rows: Iterable[Row], objective: Objective | None) -> list[Row]:
    """Order jobs: those with an objective by it, then the others by number; failed ones last.

    Args:
        rows: of a sweep.
        objective: None: all by number.
    """

    def key(row: Row) -> tuple[bool, bool, float, int]:
        failed = row.state == State.failed
        value = row.objective
        if objective is None or failed or value is None or math.isnan(value):
            return failed, True, 0.0, row.number
        return False, False, -value if objective.maximize else value, row.number

    return sorted(rows, key=key)


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
    parts = []
    for state in (State.done, State.failed, State.interrupted, State.running, State.queued):
        number = sum(row.state == state for row in rows)
        if number:
            parts.append(f"{number} {state.value}")
    return f"{len(rows)} job{'s' if len(rows) != 1 else ''}: {', '.join(parts)}"


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value
