"""Remove the checkpoints of jobs from a store, in a process of its own: clients of stores have threads, and a sweep's
process forks its jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ddp_hydra.errors import DdpHydraError
from ddp_hydra.storage.manifest import FOLDER, Entries, read_manifest
from ddp_hydra.sweep.forked_process import ForkedProcess, wait_for_message
from ddp_hydra.sweep.rows import Row, typed

FINISH_S = 60.0
"""How long the end of a sweep waits for a store."""


@dataclass(frozen=True)
class Place:
    """Say where the checkpoints of a job are in a store.

    Args:
        number: of the job.
        url: of its run there.
        own: entries of its manifest; None: all that are there are its own.
    """

    number: int
    url: str
    own: Entries | None


class StorePruning:
    """Remove checkpoints from stores while a sweep runs.

    Args:
        reason: why; the manifests there say it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.process: ForkedProcess | None = None
        self.asked: list[Place] = []

    def begin(self, places: list[Place]) -> None:
        """Begin to remove the checkpoints at some places, unless it is still busy with others."""
        if places and self.process is None:
            self.asked = places
            self.process = ForkedProcess(self._remove)

    def results(self, timeout_s: float = 0.0) -> dict[int, str]:
        """Return, by the number of each job, why its checkpoints stay, "" if they are removed; {} while it is busy.

        Args:
            timeout_s: how long to wait for the results; after that, the process is ended.
        """
        if self.process is None:
            return {}
        deadline = time.monotonic() + timeout_s
        while self.process.receive():
            if not timeout_s:
                return {}
            if (left_s := deadline - time.monotonic()) <= 0:
                self.process.end()
                break
            wait_for_message([self.process], left_s)
        process, self.process = self.process, None
        process.end()
        if process.messages:
            found: dict[int, str] = process.messages[-1]
            return found
        return {place.number: f"the process that removes them {process.describe_end()}" for place in self.asked}

    def _remove(self, pipe: Connection) -> dict[int, str]:
        """Remove the checkpoints. Runs in the forked process."""
        from ddp_hydra.storage.stored_checkpoints import remove_checkpoints

        found = {}
        for place in self.asked:
            try:
                remove_checkpoints(place.url, self.reason, place.own)
                found[place.number] = ""
            except (DdpHydraError, OSError) as error:
                found[place.number] = str(error)
        return found


def place_of(row: Row, run_dir: Path, mirror: str) -> Place | None:
    """Return where the checkpoints of a job are in a store; None if they are in its run directory only.

    Args:
        row: of the job.
        run_dir: its run directory.
        mirror: `results.mirror` of the sweep; the job may have one of its own.

    Raises:
        CheckpointError: the manifest in the run directory can't be read.
    """
    from ddp_hydra.storage import results_root

    if (url := results_root.find(str(run_dir))) != str(run_dir):  # of results.handler=cluster
        return Place(row.number, url, None)
    mirror = typed(row).get("results.mirror", mirror).strip("'\"").rstrip("/")
    own = read_manifest(run_dir / FOLDER) if mirror not in ("", "null") else {}
    return Place(row.number, f"{mirror}/{row.number}", own) if own else None
