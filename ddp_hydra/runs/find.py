"""Finds the runs below folders and URLs, and returns their rows; keeps the rows of a folder in an index."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.job.remote.status import ENDED
from ddp_hydra.runs.describe import RunRow, RunState, local_status, read_state, row_of, stored_status, text, texts
from ddp_hydra.runs.run_files import MARKS, LocalRunFiles, StoredRunFiles, reachable
from ddp_hydra.storage import urls
from ddp_hydra.storage.files import private_folder, user_cache, write_atomic
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective
from ddp_hydra.writers.run_dir import LOCK, is_held

Stamp = list[int]
Entries = dict[str, tuple[Stamp, RunRow]]
VERSION = 1
_MOST_BYTES = 2**28


class IndexFile(Struct):
    """What the file of an index holds; a row without the names of its fields, which are `columns`."""

    version: int
    columns: list[str]
    rows: list[tuple[Stamp, RunRow]]


class Index:
    """The index of one folder, whose file is read only once.

    Args:
        root: the folder, as it was typed: rows carry their paths in the same way.
    """

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


def rows(roots: list[str]) -> list[RunRow]:
    found: dict[str, RunRow] = {}
    for root in roots or [name for name in DEFAULT_ROOTS if Path(name).is_dir()]:
        place = urls.plain_path(root)
        below: Iterable[RunRow]
        if urls.is_url(place):
            below = stored_rows(place)
        elif Path(place).is_dir():
            below = local_rows(place, Index(place))
        else:
            raise ConfigError(f"{root}: there is no such folder: give one that holds runs, outputs, or a URL")
        for row in below:
            found.setdefault(row.run, row)
    return list(found.values())


def local_rows(root: str, index: Index | None = None) -> Iterator[RunRow]:
    earlier = index.read() if index else {}
    kept: dict[str, tuple[Stamp, RunRow]] = {}
    sweeps: dict[str, SweepJobs] = {}
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
    sweeps: dict[str, SweepJobs],
) -> RunRow:
    """Return a row as it is now: the files of a run do not tell whether its process lives."""
    ended = row.status
    if ended in ENDED and LOCK not in entries and "status.json" not in entries:
        return row
    of_status = (content or read_state(LocalRunFiles(folder))).status if "status.json" in entries else None
    shown = replace(row, status=local_status(folder, entries, ended, of_status))
    if shown.status == "running" and (begun := _begun(entries)) is not None:
        shown.started, shown.wall_s = begun, max(0.0, time.time() - begun)
    parent = os.path.dirname(folder)  # noqa: PTH120
    if shown.status == "unknown":
        if parent not in sweeps:
            sweeps[parent] = SweepJobs(parent)
        sweeps[parent].fill(shown)
    if shown.started is None:
        shown.started = _begun(entries)
    return shown


def _begun(entries: dict[str, os.DirEntry[str]]) -> float | None:
    """Return when the newest process of a run began: it has made the lock, or Hydra's folder."""
    for name in (LOCK, ".hydra"):
        if name in entries:
            try:
                return entries[name].stat(follow_symlinks=False).st_mtime
            except OSError:
                continue
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
        if name in entries:
            try:
                found = entries[name].stat(follow_symlinks=False)
            except OSError:
                continue
            stamp += [found.st_mtime_ns, found.st_size, found.st_ino]
        else:
            stamp.append(0)
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


class SweepContent(Struct):
    """What is read of a sweep.json."""

    objective: SweepObjective
    jobs: list[JobRow]


class SweepJobs:
    """The jobs in the sweep.json of a folder, by their own folders' names; none if there is no such file.

    Args:
        folder: of the sweep.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            content = msgspec.json.decode(LocalRunFiles(folder).read(SWEEP), type=SweepContent)
        except (ValueError, RecursionError):
            content = SweepContent(SweepObjective("", None), [])
        self.jobs, self.objective = {job.folder: job for job in content.jobs}, content.objective

    def fill(self, row: RunRow) -> None:
        job = self.jobs.get(Path(row.run).name)
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
