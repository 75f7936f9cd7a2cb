"""Removes the checkpoints of jobs that are not among the best any more: `hydra.launcher.keep=best:5`."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ddp_hydra.errors import ConfigError, DdpHydraError
from ddp_hydra.storage import files, run_ref
from ddp_hydra.storage.files import write_atomic, writing
from ddp_hydra.storage.manifest import ALIASES, FOLDER, NAME, STEP, encode_manifest, read_manifest
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective, data_of, score, typed
from ddp_hydra.sweep.scheduler import ForkedProcess, wait_for_message
from ddp_hydra.writers.run_dir import locked

log = logging.getLogger(__name__)
FINISH_S = 60.0
"""How long the end of a sweep waits for a store."""
LOOK_S = 1.0
"""How often it is looked whether the user wants to wait no longer."""
_FINAL = (JobState.done, JobState.stopped)
"""Jobs in other states may be resumed, and need their checkpoints."""
_WELL = (*_FINAL, JobState.paused)
"""The states in which a member of a population has ended its generation well."""


def number_kept(keep: object) -> int | None:
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

    Jobs with other data have a best of their own. `most` jobs keep their checkpoints, and so do the jobs with the
    `most` best `best.pt`.
    """
    surpassed, latest = _by_generation(rows)
    data = data_of(rows, objective)
    groups: dict[object, list[JobRow]] = {}
    for row in latest:
        if row.state in _FINAL:
            groups.setdefault(data[row.number], []).append(row)
    for group in groups.values():
        last = {row.number: row.objective for row in group}
        best = {row.number: row.objective if row.best is None else row.best for row in group}
        kept = _first(last, objective, most) | _first(best, objective, most)
        surpassed += [row for row in group if row.number not in kept]
    return surpassed


def _first(values: Mapping[int, float | None], objective: SweepObjective, most: int) -> set[int]:
    return set(sorted(values, key=lambda number: (-score(values[number], objective.maximize), number))[:most])


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


class Pruning:
    """Removes the checkpoints of losers while a sweep runs.

    Checkpoints in a store go first: until then, the run directory says which of them are the job's. A forked process
    removes all, because a store may hang, and its client has threads, which must not be where jobs are forked.

    Args:
        folder: of the sweep.
        keep: see `number_kept`.
        mirror: `results.mirror` of the sweep, in which each job has a folder; "" for none.
    """

    def __init__(self, folder: Path, keep: str | None, objective: SweepObjective, mirror: str = "") -> None:
        self.folder, self.objective, self.most, self.mirror = folder, objective, number_kept(keep), mirror
        self.reason = f"hydra.launcher.keep={keep}"
        self.note = f"its checkpoints were removed: {self.reason}"
        self.process: ForkedProcess | None = None
        self.asked: list[int] = []
        self.tried: set[int] = set()

    def update(self, rows: Sequence[JobRow]) -> None:
        if self.most is None:
            return
        self._take_results(rows)
        rows = [row for row in rows if row.state not in _FINAL or (self.folder / row.folder).is_dir()]  # else removed
        found = [row for row in losers(rows, self.objective, self.most) if row.number not in self.tried]
        found = [row for row in found if "its checkpoints were removed" not in row.message]
        if found and self.process is None:
            self.asked = [row.number for row in found]
            self.tried.update(self.asked)
            self.process = ForkedProcess(lambda pipe: {row.number: self._remove(row) for row in found})

    def finish(self, rows: Sequence[JobRow], timeout_s: Callable[[], float] = lambda: FINISH_S) -> None:
        """Remove what is left to remove; `timeout_s`: how long this may take, which may become less meanwhile."""
        begin = time.monotonic()
        self.update(rows)
        while self.process is not None:
            wait_for_message([self.process], max(0.1, min(LOOK_S, begin + timeout_s() - time.monotonic())))
            if time.monotonic() >= begin + timeout_s():
                self.process.end()
                self._take_results(rows)
                return
            self.update(rows)

    def _take_results(self, rows: Sequence[JobRow]) -> None:
        process = self.process
        if process is None or process.receive():
            return
        self.process = None
        said = f"the process that removes them ended ({process.describe_end()})"
        results: dict[int, str | None] = process.messages[-1] if process.messages else dict.fromkeys(self.asked, said)
        process.end()
        for row in rows:
            if why := results.get(row.number):
                log.warning("the checkpoints of job %d stay: %s", row.number, why)
            elif results.get(row.number) is not None:
                row.message = "; ".join(filter(None, [row.message, self.note]))

    def _remove(self, row: JobRow) -> str | None:
        """Remove the checkpoints of a job; return why they stay, "" if they don't, None if there are none."""
        run_dir = self.folder / row.folder
        mirror = typed(row).get("results.mirror", self.mirror).strip("'\"").rstrip("/")
        try:
            results = run_ref.RunRef.named(run_dir)
            if is_stored := results != run_ref.RunRef.own(run_dir):  # of results.handler=cluster
                run_ref.remove_checkpoints(results.place, self.reason)
            elif mirror not in ("", "null") and (own := read_manifest(run_dir / FOLDER)):
                run_ref.remove_checkpoints(f"{mirror}/{row.number}", self.reason, own)
            return "" if remove(run_dir, self.reason) or is_stored else None
        except (DdpHydraError, OSError) as error:
            return str(error)


def remove(run_dir: Path, reason: str) -> bool:
    """Remove the checkpoints of a run that no process writes; return whether it had a folder for them.

    The manifest names no file before the first one is removed, so that nothing ever points to a missing one.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir() or folder.is_symlink():
        return False
    with locked(run_dir):
        read_manifest(folder)  # not one that we don't understand
        write_atomic(folder / NAME, encode_manifest({}, removed=reason))
        for path in folder.iterdir():
            if path.name in ALIASES or STEP.fullmatch(path.name):
                with writing(path):
                    files.remove(path)
    return True
