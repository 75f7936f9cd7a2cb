"""Finds the runs below folders and URLs, and returns their rows; keeps the rows of a folder in an index."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import hashlib
import operator
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ddp_hydra.config.objective import direction_of
from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.job.remote.status import ENDED
from ddp_hydra.runs.describe import (
    STATUSES,
    RunRow,
    RunState,
    local_status,
    read_state,
    row_of,
    stored_status,
    text,
    texts,
)
from ddp_hydra.runs.run_files import MARKS, LocalRunFiles, StoredRunFiles, reachable
from ddp_hydra.storage import urls
from ddp_hydra.storage.files import private_folder, user_cache, write_atomic
from ddp_hydra.sweep.rows import JobState, SweepContent, SweepObjective
from ddp_hydra.writers.run_dir import LOCK, is_held

Stamp = list[int]
Entries = dict[str, tuple[Stamp, RunRow]]
VERSION = 2
_MOST_BYTES = 2**28


class IndexFile(Struct):
    """What the file of an index holds; a row without the names of its fields, which are `columns`."""

    version: int
    columns: list[str]
    rows: list[tuple[Stamp, RunRow]]


class Index:
    """The index of one folder, whose file is read only once; rows carry their paths as the folder was typed."""

    def __init__(self, root: str) -> None:
        self.root = os.path.normpath(root)
        real = os.path.realpath(root)
        name = hashlib.sha256(f"{real}\0{self.root}".encode(errors="surrogateescape")).hexdigest()[:32]
        self.name = f"{name}.json"
        self._kept: Entries | None = None

    def read(self) -> Entries:
        if self._kept is not None:
            return self._kept
        try:
            path = self._path()
            if path.stat().st_size <= _MOST_BYTES:
                content = msgspec.json.decode(path.read_bytes(), type=IndexFile)
                if (content.version, content.columns) == (VERSION, list(RunRow.__struct_fields__)):
                    return {row.run: (stamp, row) for stamp, row in content.rows}
        except (OSError, ValueError, RecursionError):
            pass
        return {}

    def write(self, entries: Entries, earlier: Entries) -> None:
        """Write the index, unless nothing has changed. Where that is not possible, listing is only slower."""
        self._kept = entries
        if {run: stamp for run, (stamp, _) in entries.items()} != {run: stamp for run, (stamp, _) in earlier.items()}:
            content = IndexFile(VERSION, list(RunRow.__struct_fields__), list(entries.values()))
            with contextlib.suppress(OSError, ValueError, RecordError):
                write_atomic(self._path(), msgspec.json.encode(content), durable=False)

    def _path(self) -> Path:
        return private_folder(user_cache() / "runs") / self.name


DEFAULT_ROOTS = ("outputs", "multirun")
STAMPED = (".hydra", "summary.json", "status.json", "tags.json")
"""What a row is made of; a row of the index counts while none of them has changed."""
SWEEP = "sweep.json"
"""What a sweep knows of its jobs."""
_OF_RUNS = frozenset({"checkpoints", "logs", "tensorboard", "profile"})
"""Folders of a run, in which no other run is looked for."""
_MOST_DEPTH = 16
_THREADS = 16


def places(roots: Sequence[str], place_of: Callable[[str], str] = urls.plain_path) -> Iterator[str]:
    """Yield the path or URL of each root, or of the folders in which commands make runs."""
    for root in roots or [name for name in DEFAULT_ROOTS if Path(name).is_dir()]:
        place = place_of(root)
        if not urls.is_url(place) and not Path(place).is_dir():
            raise ConfigError(f"{root}: there is no such folder: give one that holds runs, outputs, or a URL")
        yield place


def rows(roots: Sequence[str]) -> list[RunRow]:
    found: dict[str, RunRow] = {}
    for place in places(roots):
        for row in stored_rows(place) if urls.is_url(place) else local_rows(place, Index(place)):
            found.setdefault(row.run, row)
    return list(found.values())


def local_rows(root: str, index: Index | None = None) -> Iterator[RunRow]:
    earlier = index.read() if index else {}
    kept: dict[str, tuple[Stamp, RunRow]] = {}
    sweeps = Sweeps()
    for folder, entries in run_dirs(root):
        stamp, known = stamp_of(entries), earlier.get(folder)
        if known is not None and known[0] == stamp:
            row, content = known[1], None
        else:
            files = LocalRunFiles(folder)
            content = read_state(files)
            row = row_of(files, content)
            row.status = content.ended
        kept[folder] = stamp, row
        yield _now(folder, entries, row, content, sweeps)
    if index:
        index.write(kept, earlier)


def _now(
    folder: str,
    entries: dict[str, os.DirEntry[str]],
    row: RunRow,
    content: RunState | None,
    sweeps: Sweeps,
) -> RunRow:
    """Return a row as it is now: the files of a run do not tell whether its process lives."""
    ended = row.status
    if ended in ENDED and LOCK not in entries and "status.json" not in entries:
        return row
    of_status = (content or read_state(LocalRunFiles(folder))).status if "status.json" in entries else None
    shown = replace(row, status=local_status(folder, entries, ended, of_status))
    if shown.status == "running" and (begun := _begun(entries)) is not None:
        shown.started, shown.wall_s = begun, max(0.0, time.time() - begun)
    if shown.status == "unknown" and (found := sweeps.of(folder)) is not None:
        sweep, job = found
        sweep.fill(shown, job)
    if shown.started is None:
        shown.started = _begun(entries)
    return shown


def _begun(entries: dict[str, os.DirEntry[str]]) -> float | None:
    """Return when the newest process of a run began: it has made the lock, or Hydra's folder."""
    found = _stat(entries, LOCK) or _stat(entries, ".hydra")
    return found.st_mtime if found else None


def _stat(entries: dict[str, os.DirEntry[str]], name: str) -> os.stat_result | None:
    try:
        return entries[name].stat(follow_symlinks=False)
    except (KeyError, OSError):
        return None


def run_dirs(root: str) -> Iterator[tuple[str, dict[str, os.DirEntry[str]]]]:
    """Yield each run directory below a folder, itself included, and its entries by name. Links are not followed."""
    pending = [(os.path.normpath(root), 0)]
    while pending:
        folder, depth = pending.pop()
        try:
            with os.scandir(folder) as found:
                entries = {entry.name: entry for entry in found}
        except OSError:  # removed meanwhile, or not ours to read
            continue
        is_run = not MARKS.isdisjoint(entries)
        if is_run:
            yield folder, entries
        if depth < _MOST_DEPTH:
            prefix = "" if folder == "." else f"{folder.rstrip(os.sep)}/"
            pending += [
                (f"{prefix}{name}", depth + 1)
                for name, entry in entries.items()
                if name[0] != "." and not (is_run and name in _OF_RUNS) and entry.is_dir(follow_symlinks=False)
            ]


def stamp_of(entries: dict[str, os.DirEntry[str]]) -> Stamp:
    """Return what changes when one of the files of a row changes: times, sizes and inodes."""
    stamp = []
    for name in STAMPED:
        found = _stat(entries, name)
        stamp += [found.st_mtime_ns, found.st_size, found.st_ino] if found else [0]
    return stamp


def stored_rows(url: str) -> list[RunRow]:
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(stored_row, stored_runs(url)))


def stored_runs(url: str) -> list[StoredRunFiles]:
    root = urls.open_folder(url)
    try:
        with reachable():
            objects = dict(root.objects())
    except FileNotFoundError as error:
        raise ConfigError(f"{error}: check the URL") from None
    found: dict[str, dict[str, int]] = {}
    for name in objects:
        folder, _, file = name.rpartition("/")
        if file in ("status.json", "summary.json"):
            found.setdefault(folder, {})
        elif folder.rpartition("/")[2] == ".hydra":
            found.setdefault(folder.removesuffix(".hydra").rstrip("/"), {})
    for name, size in objects.items():
        folder = name
        while folder:  # the innermost run that holds it
            folder = folder.rpartition("/")[0]
            if folder in found:
                found[folder][name[len(folder) :].lstrip("/")] = size
                break
    return [StoredRunFiles(root, name, listed) for name, listed in found.items()]


def stored_row(files: StoredRunFiles) -> RunRow:
    state = read_state(files)
    found = row_of(files, state)
    found.status = stored_status(state.ended, state.status)
    return found


class SweepJobs:
    """The jobs in the sweep.json of a folder, by their own folders' paths in it; none if there is no such file."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            content = msgspec.json.decode(LocalRunFiles(folder).read(SWEEP), type=SweepContent)
        except (ValueError, RecursionError):
            content = SweepContent(1, SweepObjective("", None), [])
        self.jobs, self.objective = {os.path.normpath(job.folder): job for job in content.jobs}, content.objective

    def fill(self, row: RunRow, folder: str) -> None:
        """Fill the row of the job in a folder of the sweep."""
        job = self.jobs.get(folder)
        if job is None:
            return
        if job.state is not JobState.queued:
            row.status = job.state.value
        if row.status == "running" and not self.is_held():
            row.status = "killed"
        row.objective, row.maximize = text(self.objective.metric), self.objective.maximize
        row.value, row.metrics, row.wall_s = job.objective, job.metrics, job.wall_s
        row.overrides = row.overrides or texts(job.overrides)
        row.message = text(job.message)

    def is_held(self) -> bool:
        """Return whether the process of the sweep lives, or may live: it locks the folder."""
        return is_held(Path(self.folder).resolve()) is not False


class Sweeps:
    """The sweeps that runs are jobs of. Each sweep.json is read once."""

    def __init__(self) -> None:
        self._known: dict[Path, SweepJobs | None] = {}

    def of(self, run: str) -> tuple[SweepJobs, str] | None:
        """Return the sweep of a run, and the run's path in the sweep's folder; None if it is no job of a sweep.

        A run whose parent is the folder of a sweep is a job, also where sweep.json is broken. A deeper one, as of a
        hydra.sweep.subdir with a slash, is a job if sweep.json lists it: it may be inside another job.
        """
        whole = Path(os.path.abspath(run))  # noqa: PTH100, it has no ".."
        for folder in whole.parents:
            if folder not in self._known:
                is_sweep = os.path.lexists(folder / SWEEP)
                self._known[folder] = SweepJobs(str(folder)) if is_sweep else None
            if (sweep := self._known[folder]) is not None:
                job = str(whole.relative_to(folder))
                if folder == whole.parent or job in sweep.jobs:
                    return sweep, job
        return None


_COMPARISON = re.compile(r"([^<>=\s]+)\s*(>=|<=|>|<)\s*(.+)")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
SORTS = ("when", "duration", "steps", "status", "folder", "objective")
"""Orders, besides the names of metrics."""
OBJECTIVE = "objective"


@dataclass(frozen=True)
class Comparison:
    """Compares a metric with a number."""

    metric: str
    sign: str
    limit: float

    def holds(self, row: RunRow) -> bool:
        value = value_of(row, self.metric)
        return value is not None and _OPERATORS[self.sign](value, self.limit)


def comparison(word: str) -> Comparison | None:
    found = _COMPARISON.fullmatch(word)
    if found is None:
        return None
    try:
        return Comparison(found[1], found[2], float(found[3]))
    except ValueError:
        raise ConfigError(f"{word!r}: a metric is compared with a number, 'val/accuracy>0.9'") from None


@dataclass(frozen=True)
class Filter:
    """Chooses runs: those that match each argument, and at least one word of a list."""

    status: str = ""
    tag: str = ""
    model: str = ""
    data: str = ""
    since: str = ""
    comparisons: Sequence[Comparison] = ()

    def choose(self, rows: Sequence[RunRow]) -> list[RunRow]:
        for word in _words(self.status):
            if word not in STATUSES:
                raise ConfigError(f"status={word}: give {', '.join(STATUSES)}, several with commas")
        since = begin_of(self.since) if self.since else None
        for compared in self.comparisons:
            check_metric(compared.metric, rows)
        return [row for row in rows if self._matches(row, since)]

    def _matches(self, row: RunRow, since: float | None) -> bool:
        return (
            (not self.status or row.status in _words(self.status))
            and _one_of(self.tag, row.tags)
            and _one_of(self.model, [row.model])
            and _one_of(self.data, [row.data])
            and (since is None or (row.started is not None and row.started >= since))
            and all(compared.holds(row) for compared in self.comparisons)
        )


def begin_of(text: str) -> float:
    """Return a time in seconds since 1970, from a local date or from "7d" for seven days ago."""
    if found := _AGO.fullmatch(text):
        return time.time() - float(found[1]) * _SECONDS[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"since={text}: give a date, 2026-11-01 or 2026-11-01T10:30, or 7d, 12h, 30m") from None


def value_of(row: RunRow, metric: str) -> float | None:
    return row.value if metric == OBJECTIVE else row.metrics.get(metric)


def check_metric(metric: str, rows: Sequence[RunRow], others: Sequence[str] = ()) -> None:
    if not rows or metric == OBJECTIVE or any(metric in row.metrics for row in rows):
        return
    known = sorted({name for row in rows for name in row.metrics})
    near = difflib.get_close_matches(metric, [*others, *known], 8, 0.3) or known[:8]
    allowed = ", ".join(dict.fromkeys([*others, OBJECTIVE, *near]))
    raise ConfigError(f"{metric}: no run has this metric; there are {allowed}")


def ordered(rows: Sequence[RunRow], by: str) -> list[RunRow]:
    """Order rows: the newest, longest, farthest or best first; by status or folder, from a to z."""
    if by in ("status", "folder"):
        return sorted(rows, key=lambda row: (row.status if by == "status" else "", row.run))
    if by in ("when", "duration", "steps"):
        name = {"when": "started", "duration": "wall_s", "steps": "step"}[by]
        return sorted(rows, key=lambda row: (-(getattr(row, name) or 0.0), row.run))
    check_metric(by, rows, SORTS)

    def key(row: RunRow) -> tuple[bool, str, float, str]:
        value = value_of(row, by)
        if value is None:
            return True, "", 0.0, row.run
        # Different objectives can't be compared.
        return False, row.objective if by == OBJECTIVE else "", -value if _more_is_better(row, by) else value, row.run

    return sorted(rows, key=key)


def _more_is_better(row: RunRow, metric: str) -> bool:
    if metric in (OBJECTIVE, row.objective) and row.maximize is not None:
        return row.maximize
    try:
        return direction_of(row.objective if metric == OBJECTIVE else metric) == "maximize"
    except ConfigError:
        return True


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _one_of(wanted: str, found: Sequence[str]) -> bool:
    return not wanted or any(fnmatch.fnmatchcase(one, pattern) for one in found for pattern in _words(wanted))
