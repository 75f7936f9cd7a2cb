"""Waiting for room on a full disk."""

from __future__ import annotations

import errno
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ddp_hydra.errors import DiskFull

T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
PAUSE_S = 0.5


def of_worker(folder: Path) -> str:
    """Name a worker's temporary folder on this host, with what is free there."""
    try:
        free = f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB free"
    except OSError as error:
        free = str(error.strerror)
    return f"the worker's temporary folder {folder} on host {socket.gethostname()} is full ({free})"


def retry(
    action: Callable[[], T],
    full: Callable[[], str],
    retry_s: float,
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> T:
    """Do something that writes, and try again while there is no room for it.

    Args:
        action: leaves nothing behind where it fails.
        full: says which place is full.
        retry_s: how long it is tried again.
        say: is told that it is waited for, and when that is over.
        pause: called between two tries, with seconds.

    Raises:
        DiskFull: there was no room in time.
    """
    until = None
    while True:
        try:
            done = action()
        except OSError as error:
            if error.errno not in FULL:
                raise
            now = time.monotonic()
            if until is None:
                until = now + retry_s
                if retry_s > 0:
                    say(f"{full()}: trying again for up to {retry_s:g} s; free some space there")
            if now >= until:
                raise DiskFull(
                    f"{full()}; it was tried for results.retry_s={retry_s:g} s: free some space there, or give the "
                    "workers another folder: DASK_TEMPORARY_DIRECTORY=<folder> in their environment, or dask worker "
                    "--local-directory <folder>"
                ) from error
        else:
            if until is not None:
                say(f"there is room again, after {time.monotonic() - until + retry_s:.0f} s")
            return done
        pause(PAUSE_S)
