"""Describes a run in one row, from the small files in its folder; tells whether it goes on, and how it has ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from ddp_hydra.checked import finite_number
from ddp_hydra.config import redact
from ddp_hydra.config.hydra_compat import ENV_COPY, ENV_SET
from ddp_hydra.errors import ConfigError
from ddp_hydra.job.remote.status import ENDED, LOST_S
from ddp_hydra.run_state import AttemptEntry, FailureEntry, State, Status, Summary, decode
from ddp_hydra.runs.run_files import LocalRunFiles, RunFiles, read_tags, yaml_value
from ddp_hydra.storage.urls import POINTER
from ddp_hydra.writers.run_dir import LOCK, is_locked

MOST_TEXT = 500
"""Longer texts of a run are cut."""
MOST_ATTEMPTS = 50
"""The most attempts and checkpoints that are shown."""
_LATEST = 4e9
"""Later times, in seconds since 1970, are not times of a run."""

UNREADABLE = "unreadable"
STATUSES = ("running", *ENDED, "killed", "lost", "detached", UNREADABLE, "unknown")
"""killed: its process ended without a summary. lost: it runs on another host and gives no sign of life. detached: its
results are in a store. unreadable: its summary.json or status.json is broken, or of another format. unknown: it has not
begun, or belongs to another program."""
SILENT_S = 600.0
"""Seconds without a sign of life after which a run on another host, whose lock can't be seen here, counts as lost."""


class RunRow(Struct, array_like=True):
    """Describes one run.

    Args:
        run: its path or URL.
        status: one of `STATUSES`.
        started: when its newest process began, in seconds since 1970.
        wall_s: how long that process took, or takes so far.
        value: of the objective: its value for best.pt, or the last one: of a run that goes on, or has no best.pt.
        metrics: the last value of each metric.
        project: sha256 of its code.
        message: why it failed.
        stopped_early: why it is done before its last step.
        restarts: how often it began again after an attempt that failed.
        attempts: those that failed.
        train_s: how long the last attempt has trained.
        wait_s: for how much of `train_s` a rank has waited for data.
        exchange_s: for how much of `train_s` a rank has waited for gradients of the others.
    """

    run: str
    status: str = "unknown"
    started: float | None = None
    wall_s: float | None = None
    step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    epochs: float | None = None
    objective: str = ""
    maximize: bool | None = None
    value: float | None = None
    metrics: dict[str, float | None] = {}
    model: str = ""
    data: str = ""
    tags: list[str] = []
    overrides: list[str] = []
    project: str = ""
    message: str = ""
    stopped_early: str = ""
    ranks: int | None = None
    restarts: int = 0
    attempts: list[dict[str, Any]] = []
    train_s: float | None = None
    wait_s: float | None = None
    exchange_s: float | None = None


def row_of(files: RunFiles, state: RunState) -> RunRow:
    """Return the row of a run; its `status` is left to the caller, which knows whether it goes on."""
    summary, status, newest = state.summary or Summary(status=""), state.status or Status(), state.newest
    now = newest if isinstance(newest, Status) else Status()
    chosen = choices(hydra := files.read(".hydra/hydra.yaml"))
    objective = summary.objective or status.objective
    metric = text(objective.metric) if objective else ""
    typed = yaml_value(files.read(".hydra/overrides.yaml"))
    metrics = {text(name): value for name, value in newest.metrics.items()}
    failure = text(summary.failure.message) if summary.failure else ""
    return RunRow(
        run=files.place,
        started=_time(summary.started) or _time(status.started),
        wall_s=summary.wall_s,
        step=newest.step if isinstance(newest, Status) else newest.steps,
        total_steps=now.total_steps,
        epoch=now.epoch,
        epochs=now.epochs,
        objective=metric,
        maximize={"maximize": True, "minimize": False}.get(objective.direction) if objective else None,
        value=newest.best.value if isinstance(newest, Summary) and newest.best else metrics.get(metric),
        metrics=metrics,
        model=chosen.get("model", ""),
        data=chosen.get("data", ""),
        tags=read_tags(files, summary.tags or status.tags),
        overrides=texts(typed) + variable_words(hydra),
        project=text(summary.project or status.project),
        message=text(state.problem) or failure,
        stopped_early=text(newest.stopped_early),
        ranks=newest.world_size,
        restarts=summary.restarts,
        attempts=failed_attempts(state.attempts),
        train_s=summary.train_s,
        wait_s=(summary.data or {}).get("wait_s"),
        exchange_s=summary.exchange_s,
    )


def failed_attempts(found: Iterable[AttemptEntry]) -> list[dict[str, Any]]:
    return [
        {
            "attempt": one.attempt,
            "started": _time(one.started),
            "wall_s": one.wall_s,
            "kind": text(failure.kind),
            "rank": failure.rank,
            "step": failure.step,
        }
        for one in found
        for failure in [one.failure or FailureEntry()]
    ]


def choices(content: bytes) -> dict[str, str]:
    """Return the options of the groups, from a hydra.yaml: parsing the whole file takes a hundred times as long."""
    _, _, rest = content.decode(errors="replace").partition("\n    choices:\n")
    found: dict[str, str] = {}
    for line in rest.splitlines():
        name, colon, value = line.strip().partition(": ")
        if not line.startswith("      ") or not colon:
            break
        found[name] = "" if value == "null" else text(value.strip("'\""))
    return found


def variable_words(content: bytes) -> list[str]:
    """Return the overrides of a hydra.yaml that give a job variables of the environment, without secrets."""
    _, _, rest = content.decode(errors="replace").partition("\n  overrides:\n    hydra:\n")
    part = "".join(itertools.takewhile(lambda line: line.startswith(("    - ", "     ")), rest.splitlines(True)))
    words = texts(yaml_value(part.encode())) if ENV_SET in part or ENV_COPY in part else []
    found: list[str] = redact.without([word for word in words if word.lstrip("+~").startswith((ENV_SET, ENV_COPY))])
    return found


def text(value: object) -> str:
    return value[:MOST_TEXT] if isinstance(value, str) else ""


def texts(value: object) -> list[str]:
    found = value if isinstance(value, list) else []
    return [str(one)[:MOST_TEXT] for one in found if isinstance(one, str | int | float)]


def numbers(values: Mapping[str, object]) -> dict[str, float | None]:
    return {text(name): finite_number(value) for name, value in values.items()}


def _time(value: float | None) -> float | None:
    return value if value is not None and 0 < value < _LATEST else None


class RunState(NamedTuple):
    """summary.json and status.json of a run; None for one that is missing or can't be read: `problem` says why."""

    summary: Summary | None
    status: Status | None
    problem: str = ""

    @property
    def newest(self) -> Summary | Status:
        if self.status is None or (self.status.state in ENDED and self.summary is not None):
            return self.summary or Summary(status="")
        return self.status

    @property
    def ended(self) -> str:
        if self.problem:
            return UNREADABLE
        return self.summary.status if self.summary else ""

    @property
    def attempts(self) -> list[AttemptEntry]:
        return self.newest.attempts[:MOST_ATTEMPTS]


def read_state(files: RunFiles) -> RunState:
    problems: list[str] = []

    def read(name: str, kind: type[State]) -> State | None:
        try:
            return decode(files.read(name), kind, f"{files.place}/{name}")
        except ConfigError as error:
            problems.append(str(error))
            return None

    return RunState(read("summary.json", Summary), read("status.json", Status), "; ".join(problems))


def status_of(run_dir: Path) -> str:
    state = read_state(LocalRunFiles(run_dir))
    try:
        names = {path.name for path in run_dir.iterdir()}
    except OSError:
        names = set()
    return local_status(str(run_dir), names, state.ended, state.status)


def local_status(run_dir: str, names: Collection[str], ended: str, status: Status | None) -> str:
    if status is not None and status.scheduler is not None:  # a driver has written this folder, through a store
        return stored_status(ended, status)
    has_lock = LOCK in names
    held = is_locked(Path(run_dir)) if has_lock else False
    if held:
        return "running"
    if ended == UNREADABLE or (ended in ENDED and not (has_lock and _begun_since(run_dir))):
        return ended
    if has_lock:
        return _without_word(Path(run_dir), held)
    if POINTER in names:
        return "detached"
    if status is not None and status.state in ENDED:
        return status.state
    return "unknown" if {"status.json", "metrics.jsonl", "checkpoints"}.isdisjoint(names) else "killed"


def _begun_since(run_dir: str) -> bool:
    """Return whether a process has begun after the one that wrote summary.json, and has left its lock."""
    try:
        return os.lstat(f"{run_dir}/{LOCK}").st_mtime_ns > os.lstat(f"{run_dir}/summary.json").st_mtime_ns
    except OSError:
        return False


def _without_word(run_dir: Path, held: bool | None) -> str:
    """Return the status of a run that has left its lock and no summary; `held`: see `is_locked`."""
    holder = LocalRunFiles(run_dir).read(LOCK).decode(errors="replace")
    if held is False and holder.endswith(f" on {socket.gethostname()}"):
        return "killed"
    # Some file systems show the locks of one host only.
    signs = [0.0]
    for name in (LOCK, "status.json", "metrics.jsonl"):
        with contextlib.suppress(OSError):
            signs.append((run_dir / name).lstat().st_mtime)
    return "lost" if time.time() - max(signs) > SILENT_S else "running"


def stored_status(ended: str, status: Status | None) -> str:
    if status is None or (ended == UNREADABLE and status.state in ENDED):
        return ended if ended in (*ENDED, UNREADABLE) else "unknown"
    if status.state in ENDED:  # of a command that was refused, where the summary of the run before has stayed
        return ended if ended in ENDED else status.state
    is_silent = status.time is None or time.time() - status.time > LOST_S
    return "lost" if status.state == "lost" or is_silent else "running"
