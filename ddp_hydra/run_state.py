"""summary.json and status.json of a run, as types: each field once, written from them and checked when read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, to_builtins

from ddp_hydra.checked import Count, Finite, prepare
from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.record import Record

FORMAT = 1
"""The number in both files, raised when a field changes its meaning or goes. A new field needs a default, and no new
number."""

Metrics = dict[str, Finite | None]


class FailureEntry(Struct, kw_only=True):
    """Why a run or an attempt failed; without a rank, where the job itself failed."""

    kind: str = ""
    rank: Count | None = None
    host: str | None = None
    attempt: Count | None = None
    step: Count | None = None
    message: str = ""
    place: str = ""
    traceback: str = ""


class AttemptEntry(Struct, kw_only=True):
    """An attempt that failed."""

    attempt: Count = 0
    world_size: Count | None = None
    steps_done: Count = 0
    started: Finite = 0.0
    wall_s: Finite = 0.0
    failure: FailureEntry | None = None


class Objective(Struct):
    """The metric that runs are compared by."""

    metric: str
    direction: str


class Best(Struct):
    """The best checkpoint."""

    step: Count
    value: Finite


class Summary(Struct, kw_only=True):
    """How a run ended: docs/reference/files.md describes the fields. None: not known, e.g. because the run failed."""

    format: int = FORMAT
    status: str
    failure: FailureEntry | None = None
    stopped: str | None = None
    interrupted: str | None = None
    stopped_early: str | None = None
    objective: Objective | None = None
    metrics: Metrics = {}
    matrices: dict[str, list[Any]] | None = None
    best: Best | None = None
    steps: Count | None = None
    samples: Finite | None = None
    bad_samples: Count | None = None
    from_step: Count | None = None
    train_s: Finite | None = None
    samples_per_s: Finite | None = None
    tokens_per_s: Finite | None = None
    mfu: Finite | None = None
    started: Finite | None = None
    wall_s: Finite | None = None
    world_size: Count | None = None
    attempts: list[AttemptEntry] = []
    restarts: Count = 0
    steps_lost: Count = 0
    data: dict[str, Finite] | None = None
    exchange_s: Finite | None = None
    slowest: dict[str, int | Finite | None] | None = None
    peak_memory: Count | None = None
    profile: str | None = None
    results: str | None = None
    tags: list[str] = []
    project: str | None = None
    ddp_hydra: str | None = None

    def update(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            setattr(self, name, value)

    def count_attempts(self, earlier: Sequence[AttemptEntry], failed: Sequence[AttemptEntry], begun: int) -> None:
        """Count the attempts of this process; `earlier`: those that failed in processes before it."""
        self.attempts = [*earlier, *failed]
        self.restarts = max(self.restarts, len(earlier) + begun - 1)

    @property
    def last_step(self) -> int:
        """Return the last step that was done, whether it is saved or not."""
        has_failed = len(self.attempts) > self.restarts  # its last attempt, which no other one follows
        return self.attempts[-1].steps_done if has_failed else self.steps or 0


class Status(Struct, kw_only=True):
    """Where a run is: docs/reference/files.md describes the fields. Those from `scheduler` on are a driver's."""

    format: int = FORMAT
    state: str = "starting"
    host: str | None = None
    pid: Count | None = None
    attempt: Count = 0
    world_size: Count = 0
    step: Count | None = None
    total_steps: Count | None = None
    epoch: Finite | None = None
    epochs: Finite | None = None
    eta_s: Finite | None = None
    stopped_early: str | None = None
    metrics: Metrics = {}
    attempts: list[AttemptEntry] = []
    steps_lost: Count = 0
    objective: Objective | None = None
    tags: list[str] = []
    time: Finite | None = None
    scheduler: str | None = None
    project: str | None = None
    started: Finite | None = None
    max_restarts: int = 0
    restarts: Count = 0
    steps_before: Count | None = None
    message: str = ""
    files: list[str] = []
    start: Record | None = None
    ddp_hydra: str | None = None


State = TypeVar("State", Summary, Status)


def encode(state: Summary | Status, indent: int | None = None) -> bytes:
    return (json.dumps(to_builtins(state), indent=indent, allow_nan=False) + "\n").encode()


def decode(content: bytes, kind: type[State], place: str | Path) -> State | None:
    """Read the content of a file, None if it is empty; `place` is named where it is broken, or of another format."""
    if not content:
        return None
    try:
        found = json.loads(content)
        number = found.get("format", FORMAT) if isinstance(found, dict) else FORMAT
        if number == FORMAT:
            return msgspec.convert(found, kind)
    except (ValueError, OverflowError, RecursionError, RecordError) as error:
        raise ConfigError(f"{place} can't be read: {str(error)[:200]}") from None
    by = f", {found['ddp_hydra']:.20}" if isinstance(found.get("ddp_hydra"), str) else ""
    raise ConfigError(
        f"{place} has format {number!r:.20}, and this version reads format {FORMAT}: use the version of ddp_hydra that "
        f"wrote it{by}"
    )


prepare(Summary, Status)
