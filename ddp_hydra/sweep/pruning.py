"""Removes the checkpoints of jobs that are not among the best any more: `hydra.launcher.keep=best:5`."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hydra.errors import CheckpointError, ConfigError, DdpHydraError, RecordError
from ddp_hydra.storage.files import write_atomic, writing
from ddp_hydra.storage.manifest import ALIASES, FOLDER, NAME, STEP_FILE, Entries, encode_manifest, read_manifest
from ddp_hydra.sweep.forked_process import ForkedProcess, wait_for_message
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective, data_of, sort_key, typed
from ddp_hydra.writers.run_dir import locked

log = logging.getLogger(__name__)
FINISH_S = 60.0
"""How long the end of a sweep waits for a store."""
_FINAL = (JobState.done, JobState.stopped)
"""Jobs in other states may be resumed, and need their checkpoints."""
_WELL = (*_FINAL, JobState.paused)
"""The states in which a member of a population has ended its generation well."""


def number_kept(keep: object) -> int | None:
    """Return how many jobs keep their checkpoints, by "all" or None, "none", or "best:5"; None for all."""
    if keep in ("all", None):
        return None
    if keep == "none":
        return 0
    match = re.fullmatch(r"best:([1-9]\d{0,8})", str(keep))
    if match is None:
        raise ConfigError(f"hydra.launcher.keep={keep}: give all, none or best:5")
    return int(match[1])


def losers(rows: Sequence[JobRow], objective: SweepObjective, most: int) -> list[JobRow]:
    """Return the jobs that can't be among the best any more, because enough others are better already.

    Of a population, the last generation has the best. The members of another one are losers once all members of the
    next one, which began with their checkpoints, have ended well.

    Jobs with other data have a best of their own. `most` jobs keep their checkpoints.
    """
    surpassed, latest = _by_generation(rows)
    data = data_of(rows)
    groups: dict[object, list[JobRow]] = {}
    for row in latest:
        if row.state in _FINAL:
            groups.setdefault(data[row.number], []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: (*sort_key(row.objective, objective.maximize), row.number))
        surpassed += group[most:]
    return surpassed


def _by_generation(rows: Sequence[JobRow]) -> tuple[list[JobRow], list[JobRow]]:
    """Return the members that no generation needs any more, and the jobs that are compared by their objectives."""
    generations: dict[int, list[JobRow]] = {}
    for row in rows:
        if "generation" in row.labels:
            generations.setdefault(int(row.labels["generation"]), []).append(row)
    surpassed, latest = [], [row for row in rows if "generation" not in row.labels]
    for number, members in generations.items():
        if number + 1 in generations:
            if all(row.state in _WELL for row in generations[number + 1]):
                surpassed += [row for row in members if row.state in _WELL]
        elif all(row.state in (*_FINAL, JobState.failed) for row in members):  # one that has paused is a parent soon
            latest += members
    return surpassed, latest


@dataclass(frozen=True)
class StoredRun:
    """The checkpoints of a job in a store.

    Args:
        number: of the job.
        url: of its run there.
        own: entries of its manifest; None: all that are there are its own.
    """

    number: int
    url: str
    own: Entries | None


class Pruning:
    """Removes the checkpoints of losers while a sweep runs.

    Checkpoints in a store go first: until then, the run directory says which of them are the job's. A forked process
    removes them, because a store may hang, and its client has threads, which must not be where jobs are forked.

    Args:
        folder: of the sweep.
        keep: see `number_kept`.
        objective: the metric that jobs are compared by.
        mirror: `results.mirror` of the sweep, in which each job has a folder; "" for none.

    Raises:
        ConfigError: it is not known which jobs are better, or `keep` has no such value.
    """

    def __init__(self, folder: Path, keep: str | None, objective: SweepObjective, mirror: str = "") -> None:
        self.folder, self.objective, self.most, self.mirror = folder, objective, number_kept(keep), mirror
        self.reason = f"hydra.launcher.keep={keep}"
        self.note = f"its checkpoints were removed: {self.reason}"
        self.process: ForkedProcess | None = None
        self.asked: list[StoredRun] = []
        self.tried: set[int] = set()
        if self.most and objective.maximize is None:
            raise ConfigError(
                f"{self.reason}: it is not known whether a higher {objective.metric} is better: give "
                "objective.direction=maximize or minimize, too"
            )

    def update(self, rows: Sequence[JobRow]) -> None:
        """Remove the checkpoints of the jobs that are losers by now; their rows say so."""
        if self.most is None:
            return
        self._take_results(rows)
        stored = []
        for row in losers(rows, self.objective, self.most):
            if "its checkpoints were removed" in row.message or row.number in self.tried:
                continue
            try:
                run = stored_run(row, self.folder / row.folder, self.mirror)
            except CheckpointError as error:
                log.warning("the checkpoints of job %d stay: %s", row.number, error)
                self.tried.add(row.number)
                continue
            if run is not None:
                stored.append(run)
            elif remove(self.folder / row.folder, self.reason):
                self._note(row)
        if stored and self.process is None:
            self.asked = stored
            self.process = ForkedProcess(lambda pipe: remove_stored(stored, self.reason))

    def finish(self, rows: Sequence[JobRow], timeout_s: float = FINISH_S) -> None:
        """Wait until the checkpoints of all losers are removed, but not longer than the timeout for a store."""
        deadline = time.monotonic() + timeout_s
        self.update(rows)
        while self.process is not None:
            wait_for_message([self.process], max(0.1, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                self.process.end()
                self._take_results(rows)
                return
            self.update(rows)

    def _take_results(self, rows: Sequence[JobRow]) -> None:
        """Once checkpoints are removed from stores, remove them from run directories, too."""
        process = self.process
        if process is None or process.receive():
            return
        self.process = None
        if process.messages:
            results: dict[int, str] = process.messages[-1]
        else:
            results = {run.number: f"the process that removes them {process.describe_end()}" for run in self.asked}
        process.end()
        self.tried |= results.keys()
        for row in rows:
            if why := results.get(row.number):
                log.warning("the checkpoints of job %d stay: %s", row.number, why)
            elif row.number in results:
                run_dir = self.folder / row.folder
                if not (run_dir / FOLDER).is_dir() or remove(run_dir, self.reason):
                    self._note(row)

    def _note(self, row: JobRow) -> None:
        row.message = "; ".join(filter(None, [row.message, self.note]))


def remove_stored(runs: Sequence[StoredRun], reason: str) -> dict[int, str]:
    from ddp_hydra.storage.run_ref import remove_checkpoints

    found = {}
    for run in runs:
        try:
            remove_checkpoints(run.url, reason, run.own)
            found[run.number] = ""
        except (DdpHydraError, OSError) as error:
            found[run.number] = str(error)
    return found


def remove(run_dir: Path, reason: str) -> bool:
    """Remove the checkpoints of a run that no process writes; return whether there are none any more.

    The manifest names no file before the first one is removed, so that nothing ever points to a missing one.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir() or folder.is_symlink():
        return False
    try:
        with locked(run_dir):
            read_manifest(folder)  # not one that we don't understand
            write_atomic(folder / NAME, encode_manifest({}, removed=reason))
            for path in folder.iterdir():
                if path.name in ALIASES or STEP_FILE.fullmatch(path.name):
                    with writing(path), contextlib.suppress(FileNotFoundError):
                        path.unlink()
    except (CheckpointError, ConfigError, RecordError, OSError) as error:
        log.warning("the checkpoints in %s stay: %s", folder, error)
        return False
    return True


def stored_run(row: JobRow, run_dir: Path, mirror: str) -> StoredRun | None:
    """Return the checkpoints of a job in a store; None if they are in its run directory only."""
    from ddp_hydra.storage.run_ref import RunRef

    if (results := RunRef.named(run_dir)) != RunRef.own(run_dir):  # of results.handler=cluster
        return StoredRun(row.number, results.place, None)
    mirror = typed(row).get("results.mirror", mirror).strip("'\"").rstrip("/")
    own = read_manifest(run_dir / FOLDER) if mirror not in ("", "null") else {}
    return StoredRun(row.number, f"{mirror}/{row.number}", own) if own else None
