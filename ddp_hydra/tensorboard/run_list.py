"""Lists the runs below TensorBoard's log directory, tells which have changed, and describes one."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from ddp_hydra.checked import finite_number
from ddp_hydra.runs import details, find
from ddp_hydra.runs.describe import RunRow, text
from ddp_hydra.runs.find import Index, Sweeps
from ddp_hydra.runs.run_files import LocalRunFiles, RunFiles, StoredRunFiles
from ddp_hydra.storage import urls
from ddp_hydra.writers.run_dir import json_object

SHORTEST_PAUSE_S = 1.0
PAUSE_FACTOR = 4
"""After a look at all runs, the next one waits for this many times as long as it took."""
MOST_METRICS = 200
LOG_BYTES = 2**16
"""So much of the end of a log is shown."""
CURVE_BYTES = 2**20
"""So much of the end of metrics.jsonl is read for the time line."""
MOST_POINTS = 400
MOST_KEYS = 1_000
MOST_LOGS = 1_000
_LOG = re.compile(r"logs/rank-(\d{1,6})\.log")
_NOT_SHOWN = ("run", "project")
_KEYS = tuple(one.name for one in fields(find.Filter) if one.name != "comparisons")


class NoSuchRunError(LookupError):
    """There is no run with this id, or no more."""


@dataclass
class ListEntry:
    """A run as the page knows it."""

    row: RunRow
    root: str
    shown: dict[str, Any]
    version: int = 0


class RunList:
    """All runs below some folders and URLs. Its methods may be called by several threads."""

    def __init__(self, roots: Mapping[str, str]) -> None:
        self._roots = {title: root if urls.is_url(root) else os.path.normpath(root) for title, root in roots.items()}
        self._lock = threading.Lock()
        self._indexes = {root: Index(root) for root in self._roots.values() if not urls.is_url(root)}
        self._runs: dict[str, ListEntry] = {}
        self._removed: dict[str, int] = {}
        self._shown_sweeps: dict[str, dict[str, Any]] = {}
        self._version = 0
        self._next_look = 0.0
        self._instance = secrets.token_hex(8)

    def changes(self, instance: str = "", since: int = 0, filter_text: str = "") -> dict[str, Any]:
        """Return the rows that have changed, and the ids of the runs that a filter takes.

        Args:
            instance: as the page got it before; all rows are returned if it is another one, "" for example.
            filter_text: words as `ddp-hydra runs ls` takes them, and "sweep=<name>"; others are looked for in names,
                overrides, tags and messages.
        """
        with self._lock:
            self._look()
            if instance != self._instance or since > self._version:
                since = 0
            found: dict[str, Any] = {
                "instance": self._instance,
                "version": self._version,
                "now": time.time(),
                "rows": [one.shown for one in self._runs.values() if one.version > since],
                "removed": [key for key, version in self._removed.items() if since and version > since],
                "sweeps": self._shown_sweeps,
            }
            if filter_text.strip():
                found["chosen"] = choose(list(self._runs.values()), filter_text)
            return found

    def files(self, key: str) -> RunFiles:
        """Return the files of the run with an id. Links and pointers to other folders are not followed."""
        with self._lock:
            if key not in self._runs:
                self._look()
            if key not in self._runs:
                raise NoSuchRunError(key)
            place, root = self._runs[key].row.run, self._runs[key].root
        if urls.is_url(place):
            return StoredRunFiles(urls.open_folder(place))
        inner = os.path.relpath(place, root)
        if os.path.realpath(place) != os.path.normpath(os.path.join(os.path.realpath(root), inner)):  # noqa: PTH118
            raise NoSuchRunError(key)  # a link has taken the place of a folder
        return LocalRunFiles(place)

    def details(self, key: str) -> dict[str, Any]:
        files = self.files(key)
        found = details.run_details(files)
        own = {"id": key, "name": self._name(key), "place": files.place, "code": found["project"], "logs": logs(files)}
        return {**shown(found), **own, **progress(files, found["objective"])}

    def log(self, key: str, rank: int) -> dict[str, Any]:
        content = self.files(key).read(f"logs/rank-{rank}.log", LOG_BYTES)
        return {"rank": rank, "text": content.decode(errors="replace"), "is_cut": len(content) >= LOG_BYTES}

    def comparison(self, keys: Sequence[str]) -> dict[str, Any]:
        found = details.between(*map(self.files, keys))
        parts = {part: _texts_of(found[part]) for part in ("choices", "config", "metrics")}
        own = {"ids": list(keys), "names": [self._name(key) for key in keys]}
        return {**own, **{name: found[name] for name in ("status", "code", "problems")}, **parts}

    def _name(self, key: str) -> str:
        with self._lock:
            return str(self._runs[key].shown["name"]) if key in self._runs else ""

    def _look(self) -> None:
        begin = time.monotonic()
        if begin < self._next_look:
            return
        seen: dict[str, ListEntry] = {}
        sweeps, known = dict[str, dict[str, Any]](), Sweeps()
        for title, root in self._roots.items():
            for row in self._rows(root):
                inner = below(row.run, root)
                name = "/".join(filter(None, (title, inner))) or Path(root).resolve().name
                sweep = "" if urls.is_url(root) else _sweep_of(row.run, inner, name, known, sweeps)
                key = hashlib.sha256(row.run.encode(errors="surrogateescape")).hexdigest()[:20]
                seen.setdefault(
                    key, ListEntry(row, root, {"id": key, "name": name, "sweep": sweep, **shown(asdict(row))})
                )
        self._take_over(seen)
        self._shown_sweeps = sweeps
        took = time.monotonic() - begin
        self._next_look = time.monotonic() + max(SHORTEST_PAUSE_S, PAUSE_FACTOR * took)

    def _rows(self, root: str) -> Sequence[RunRow]:
        if urls.is_url(root):
            return find.stored_rows(root)
        return list(find.local_rows(root, index=self._indexes[root])) if Path(root).is_dir() else []

    def _take_over(self, seen: dict[str, ListEntry]) -> None:
        version = self._version + 1
        for key, one in seen.items():
            before = self._runs.get(key)
            one.version = before.version if before and before.shown == one.shown else version
            self._removed.pop(key, None)
        gone = self._runs.keys() - seen.keys()
        self._removed |= dict.fromkeys(gone, version)
        if gone or any(one.version == version for one in seen.values()):
            self._version = version
        self._runs = seen


def _sweep_of(run: str, inner: str, name: str, known: Sweeps, sweeps: dict[str, dict[str, Any]]) -> str:
    """Return the name of the sweep that a run is a job of, "" if there is none, and add the sweep to `sweeps`.

    Args:
        inner: the run's path below the log directory. A sweep above that is not shown.
        name: of the run, with the same end.
    """
    found = known.of(run)
    if found is None or len(found[1]) > len(inner):
        return ""
    sweep, job = found
    title = name[: -len(job)].rstrip("/") or Path(sweep.folder).name
    if title not in sweeps:
        sweeps[title] = {"jobs": len(sweep.jobs), "running": sweep.is_held()}
    return title


def choose(runs: Sequence[ListEntry], filter_text: str) -> list[str]:
    try:
        words = shlex.split(filter_text)
    except ValueError:  # a quote that is still open
        words = filter_text.split()
    given: dict[str, str] = {}
    compared, sweeps, others = [], [], []
    for word in words:
        key, _, value = word.partition("=")
        if (comparison := find.comparison(word)) is not None:
            compared.append(comparison)
        elif key in _KEYS and value:
            given[key] = value
        elif key == "sweep" and value:
            sweeps.append(value)
        else:
            others.append(word.casefold())
    found = find.Filter(**given, comparisons=tuple(compared)).choose([one.row for one in runs])
    taken = {row.run for row in found}
    runs = [one for one in runs if not sweeps or one.shown["sweep"] in sweeps]
    return [one.shown["id"] for one in runs if one.row.run in taken and all(word in _words_of(one) for word in others)]


def _words_of(run: ListEntry) -> str:
    row = run.row
    texts = (run.shown["name"], row.status, row.model, row.data, row.message, row.stopped_early)
    return "\n".join((*texts, *row.overrides, *row.tags)).casefold()


def below(place: str, root: str) -> str:
    root = root.rstrip("/")
    return place[len(root) :].strip("/") if place.startswith(root) else place


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row, or the details of a run, as JSON has them. A run that goes on does not change with the time."""
    found = {name: value for name, value in row.items() if name not in _NOT_SHOWN}
    found["metrics"] = dict(islice(row["metrics"].items(), MOST_METRICS))
    if row["status"] == "running":
        found["wall_s"] = None
    return found


def progress(files: RunFiles, objective: str) -> dict[str, Any]:
    """Return what the end of metrics.jsonl says.

    `logged`: for each attempt the times and steps of its first and last line; `curve`: time, step and value for each
    line with the objective, thinned out.
    """
    logged: dict[int, dict[str, Any]] = {}
    curve = []
    for line in files.read("metrics.jsonl", CURVE_BYTES).splitlines():
        entry = json_object(line)
        at, step, value = (finite_number(entry.get(name)) for name in ("time", "step", objective))
        attempt = finite_number(entry.get("attempt"))
        if at is None or step is None or attempt is None:
            continue
        known = logged.setdefault(int(attempt), {"attempt": int(attempt), "first": at, "from_step": step})
        known |= {"last": at, "to_step": step}
        if value is not None:
            curve.append([at, step, value])
    every = max(1, -(-len(curve) // MOST_POINTS))
    return {"logged": list(islice(logged.values(), MOST_KEYS)), "curve": curve[::-every][::-1]}


def logs(files: RunFiles) -> list[dict[str, int]]:
    found = [
        {"rank": int(name[1]), "bytes": size}
        for path, size in files.sizes().items()
        if (name := _LOG.fullmatch(path)) is not None
    ]
    return sorted(found, key=lambda one: one["rank"])[:MOST_LOGS]


def _texts_of(table: Mapping[Any, Sequence[Any]]) -> dict[str, list[str]]:
    ways = (_value_text, lambda value: text(details.json_text(value)))
    return {text(str(key)): details.cells(values, *ways) for key, values in islice(table.items(), MOST_KEYS)}


def _value_text(value: object) -> str:
    return text(value if isinstance(value, str) else details.json_text(value))
