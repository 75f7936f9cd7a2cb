"""Tells whether a run goes on, and how it has ended."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from ddp_hydra.job.remote.status import ENDED, LOST_S
from ddp_hydra.run_state import Status
from ddp_hydra.runs.describe import read_state
from ddp_hydra.runs.run_files import LocalRunFiles
from ddp_hydra.storage.results_root import POINTER
from ddp_hydra.writers.run_dir import LOCK, is_locked

STATUSES = ("running", *ENDED, "killed", "lost", "detached", "unknown")
"""killed: its process ended without a summary. lost: it runs on another host and gives no sign of life. detached: its
results are in a store. unknown: it has not begun, or belongs to another program."""
SILENT_S = 600.0
"""Seconds without a sign of life after which a run on another host, whose lock can't be seen here, counts as lost."""


def of_run_dir(run_dir: Path) -> str:
    state = read_state(LocalRunFiles(run_dir))
    try:
        names = {path.name for path in run_dir.iterdir()}
    except OSError:
        names = set()
    return of_local(str(run_dir), names, state.summary.status if state.summary else "", state.status)


def of_local(run_dir: str, names: Iterable[str], ended: str, status: Status | None) -> str:
    names = set(names)
    if status is not None and status.scheduler is not None:  # a driver has written this folder, through a store
        return of_stored(ended, status)
    held = is_locked(Path(run_dir)) if LOCK in names else False
    if held:
        return "running"
    if ended in ENDED and not (LOCK in names and _begun_since(run_dir)):
        return ended
    if LOCK in names:
        return _without_word(Path(run_dir), held)
    if POINTER in names:
        return "detached"
    if status is not None and status.state in ENDED:
        return status.state
    return "unknown" if names.isdisjoint({"status.json", "metrics.jsonl", "checkpoints"}) else "killed"


def _begun_since(run_dir: str) -> bool:
    """Return whether a process has begun after the one that wrote summary.json, and has left its lock."""
    try:
        return os.lstat(f"{run_dir}/{LOCK}").st_mtime_ns > os.lstat(f"{run_dir}/summary.json").st_mtime_ns
    except OSError:
        return False


def _without_word(run_dir: Path, held: bool | None) -> str:
    """Return the status of a run that has left its lock and no summary.

    Args:
        held: False: nobody on this host holds the lock; None: the file system can't tell.
    """
    holder = LocalRunFiles(run_dir).read(LOCK).decode(errors="replace")
    if held is False and holder.endswith(f" on {socket.gethostname()}"):
        return "killed"
    # Some file systems show the locks of one host only.
    signs = [0.0]
    for name in (LOCK, "status.json", "metrics.jsonl"):
        with contextlib.suppress(OSError):
            signs.append((run_dir / name).lstat().st_mtime)
    return "lost" if time.time() - max(signs) > SILENT_S else "running"


def of_stored(ended: str, status: Status | None) -> str:
    """Return the status of a run that a driver writes into a store; arguments as for `of_local`."""
    if status is None:
        return ended if ended in ENDED else "unknown"
    if status.state in ENDED:
        return status.state
    is_silent = status.time is None or time.time() - status.time > LOST_S
    return "lost" if status.state == "lost" or is_silent else "running"
