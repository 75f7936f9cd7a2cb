"""The table of the jobs of a sweep, and their order from the best to the worst."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from msgspec import Struct

from ddp_hydra.checked import Count, Finite

OF_READING = frozenset({
    "batch_size", "global_batch", "workers", "prefetch", "prefetch_shards", "memory_mb", "threads", "cache_dir",
    "cache_mb", "cache_gb", "client", "timeout_s", "retry_timeout_s", "listing_max_age_s", "storage_options", "region",
    "anon", "addressing", "shuffle_buffer", "shard_by", "decoders", "streaming", "name", "flip", "crop_scale",
    "crop_ratio", "center_crop", "image_size", "transform", "features",
})  # fmt: skip
"""Keys of `data` that change how samples are read, or what the model sees of them. Others choose other data."""
MODEL_KEYS = frozenset({"model", "model._target_"})
"""Overrides that choose a model; the other keys of `model` change it."""

VALUE = "value"
"""What the return value of another app's task is called, where `objective.metric` names no other."""
LINEAGE_KEYS = frozenset({"resume", "trainer.pause_after_validations"})
"""Overrides of a sweeper that labels its jobs: the labels say the same in better words."""


class JobState(Enum):
    """What a job does, or how it has ended."""

    queued = "queued"
    running = "running"
    paused = "paused"
    done = "done"
    stopped = "stopped"
    failed = "failed"
    interrupted = "interrupted"

    @property
    def has_ended(self) -> bool:
        return self in (JobState.done, JobState.stopped, JobState.failed, JobState.interrupted)


@dataclass
class JobRow:
    """The state and the results of one job.

    Args:
        number: Hydra's `hydra.job.num`.
        overrides: the job's own, as typed, without secrets, and the variables of `hydra.job.env_set` that its config
            reads.
        folder: its run directory, in the sweep's folder.
        objective: the last value of the metric that jobs are compared by.
        best: its value for `best.pt`.
        metrics: the last value of each metric.
        workers: 0 while it waits for them.
        message: why it failed, or where and why it was stopped, in one line.
        value: the return value of the task, if JSON can represent it.
        filled: from its config, the values of keys that only other jobs give.
        labels: what the sweeper says of the job, such as its generation.
        shared: keys that it gives and that its data refer to, or its loss or task; see `JobQueue.shared_keys`.
    """

    number: Count
    overrides: list[str]
    folder: str
    state: JobState = JobState.queued
    objective: Finite | None = None
    best: Finite | None = None
    metrics: dict[str, Finite | None] = field(default_factory=dict)
    step: Count | None = None
    total_steps: Count | None = None
    epoch: Finite | None = None
    epochs: Finite | None = None
    workers: Count = 0
    wall_s: Finite = 0.0
    eta_s: Finite | None = None
    message: str = ""
    value: Any = None
    filled: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)

    @property
    def shown_state(self) -> str:
        """Return the state for the user: a running job may still wait for its workers."""
        return "waiting" if self.state == JobState.running and not self.workers else self.state.value


@dataclass(frozen=True)
class SweepObjective:
    """The metric that jobs are compared by; `maximize` is None if it is not known what is better."""

    metric: str
    maximize: bool | None

    @property
    def better(self) -> str:
        return "higher is better" if self.maximize else "lower is better"

    def ranks(self, rows: Sequence[JobRow]) -> bool:
        """Return whether one of these jobs is the best: the direction is known, and all have the same data."""
        return self.maximize is not None and len(set(data_of(rows, self).values())) < 2


class SweepContent(Struct):
    """What is read of a sweep.json."""

    version: Literal[1]
    objective: SweepObjective
    jobs: list[JobRow]


def score(value: float | None, maximize: bool | None) -> float:
    """Return a number that is higher for a better value of an objective; no value, and NaN, are the worst."""
    if value is None or math.isnan(value):
        return -math.inf
    return value if maximize else -value


def best_first(rows: Iterable[JobRow], objective: SweepObjective) -> list[JobRow]:
    """Order jobs: those with an objective by it, then the others by number; failed ones last.

    Jobs are grouped by their data, because values from different data sets cannot be compared. Without a direction, all
    are ordered by number.
    """
    rows = list(rows)
    data = data_of(rows, objective)
    places = {value: place for place, value in enumerate(dict.fromkeys(data.values()))}

    def key(row: JobRow) -> tuple[bool, int, float, int]:
        failed = row.state == JobState.failed
        if objective.maximize is None or failed:
            return failed, 0, 0.0, row.number
        return False, places[data[row.number]], -score(row.objective, objective.maximize), row.number

    return sorted(rows, key=key)


Chosen = tuple[tuple[str, str], ...]
"""Keys and values that a job was given."""


def data_of(rows: Sequence[JobRow], objective: SweepObjective) -> dict[int, Chosen]:
    """Return, by job number, the swept keys and values for which the job's objective is one of its own.

    They choose the data, what counts in them, or, where the objective is a loss, the loss.
    """
    return _chosen(rows, lambda key, shared: key in shared or chooses_data(key, objective.metric))


def chooses_data(key: str, metric: str) -> bool:
    """Return whether values of a metric can't be compared if a key of the config has other values."""
    place = place_of(key)
    top, _, rest = place.partition(".")
    if top == "hydra":  # a variable of the environment, which the config reads
        return True
    first, _, deeper = rest.partition(".")
    if top == "data":
        of_training = first == "train" and not metric.startswith("train")
        return not (of_training or first in OF_READING or (deeper and deeper.split(".")[0] in OF_READING))
    if place in ("experiment", "task", "task.ignore", "task.shift", "task.without") or key.startswith("experiment/"):
        return True
    return top in ("task", "loss") and metric.rpartition("/")[2] == "loss"


def place_of(key: str) -> str:
    """Return where in the config the values of a key are, or those of a group: data.split of data/split."""
    group, _, package = key.partition("@")
    return (package.removeprefix("_global_").lstrip(".") or group).replace("/", ".")


def group_of(rows: Sequence[JobRow], objective: SweepObjective) -> dict[int, Chosen]:
    return _chosen(rows, lambda key, shared: key in MODEL_KEYS or key in shared or chooses_data(key, objective.metric))


def _chosen(rows: Sequence[JobRow], is_wanted: Callable[[str, set[str]], bool]) -> dict[int, Chosen]:
    shared = {key for row in rows for key in row.shared}
    return {
        number: tuple((key, value) for key, value in values.items() if is_wanted(key, shared))
        for number, values in swept(rows).items()
    }


def typed(row: JobRow) -> dict[str, str]:
    parts = (override.partition("=") for override in row.overrides)
    return {key.lstrip("+"): value for key, _, value in parts}


def swept(rows: Sequence[JobRow]) -> dict[int, dict[str, str]]:
    """Return, by job number, the keys that some job gives and that have not the same value in all jobs."""
    given = {row.number: typed(row) for row in rows}
    hidden = LINEAGE_KEYS if any(row.labels for row in rows) else ()
    keys = {key: None for values in given.values() for key in values if key not in hidden}
    if len(rows) > 1:
        given = {row.number: row.filled | given[row.number] for row in rows}
        keys = {key: None for key in keys if len({comparable(values.get(key)) for values in given.values()}) > 1}
    return {number: {key: values[key] for key in keys if key in values} for number, values in given.items()}


def comparable(value: str | None) -> object:
    """Return the number that a value is, so that 0.1 and 1e-1 are the same; else the value."""
    try:
        number = float(value or "")
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def describe_counts(rows: Iterable[JobRow]) -> str:
    rows = list(rows)
    names = [row.shown_state for row in rows]
    parts = []
    for name in ("done", "stopped", "failed", "interrupted", "paused", "running", "waiting", "queued"):
        if number := names.count(name):
            parts.append(f"{number} {name}")
    return f"{len(rows)} job{'s' if len(rows) != 1 else ''}: {', '.join(parts)}"
