"""Retries what fails because a disk is full."""

from __future__ import annotations

import errno
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ddp_hydra.errors import DiskFull
from ddp_hydra.storage.retry import Backoff

T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
LONGEST_PAUSE_S = 0.5


def describe_full_folder(folder: Path) -> str:
    """Return a sentence that names a worker's temporary folder on this host, and what is free there."""
    try:
        free = f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB free"
    except OSError as error:
        free = str(error.strerror)
    return f"the worker's temporary folder {folder} on host {socket.gethostname()} is full ({free})"


def retry_while_full(
    action: Callable[[], T],
    describe: Callable[[], str],
    retry_s: float,
    warn: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> T:
    """Do something that writes, and retry it while the disk is full.

    Args:
        action: leaves nothing behind if it fails.
        describe: returns a sentence that says which place is full.
        retry_s: how long to retry.
        warn: gets a sentence when the waiting begins, and one when it is over.
        pause: called between two tries, with seconds.

    Raises:
        DiskFull: there was no space in time.
    """
    backoff = None
    while True:
        try:
            result = action()
        except OSError as error:
            if error.errno not in FULL:
                raise
            if backoff is None:
                backoff = Backoff(retry_s, pause, LONGEST_PAUSE_S)
                if retry_s > 0:
                    warn(f"{describe()}: trying again for up to {retry_s:g} s; free some space there")
            if not backoff.wait():
                raise DiskFull(
                    f"{describe()}; it was tried for results.retry_s={retry_s:g} s: free some space there, or give the "
                    "workers another folder: DASK_TEMPORARY_DIRECTORY=<folder> in their environment, or dask worker "
                    "--local-directory <folder>"
                ) from error
        else:
            if backoff is not None:
                warn(f"there is room again, after {backoff.elapsed_s:.0f} s")
            return result
