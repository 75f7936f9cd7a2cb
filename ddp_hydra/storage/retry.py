"""Decides how long to wait between the tries of something that failed, and tries again what a full disk stops."""

from __future__ import annotations

import errno
import random
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ddp_hydra.errors import DiskFull

T = TypeVar("T")
FIRST_PAUSE_S = 0.1
FULL = (errno.ENOSPC, errno.EDQUOT)
LONGEST_PAUSE_WHEN_FULL_S = 0.5


class Backoff:
    """Waits before each new try, longer each time, until the time is over or somebody gives up.

    Its time begins when it is made. The callers decide which errors to retry, and what to tell the user.

    Args:
        timeout_s: how long to try.
        sleep: waits for a number of seconds, and returns whether to give up. `wait` of a threading.Event is one.
        longest_pause_s: the longest wait.

    Attributes:
        tries: how many tries were made.
    """

    def __init__(
        self, timeout_s: float, sleep: Callable[[float], bool | None] = time.sleep, longest_pause_s: float = 5.0
    ) -> None:
        self._begin = time.monotonic()
        self._deadline = self._begin + timeout_s
        self.tries = 1
        self._sleep = sleep
        self._pause_s = FIRST_PAUSE_S
        self._longest_pause_s = longest_pause_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._begin

    def wait(self) -> bool:
        """Wait before the next try, and return True. Return False if there shall be no other try."""
        left_s = self._deadline - time.monotonic()
        # Unequal pauses keep many processes from coming back all at once.
        pause_s = min(left_s, self._pause_s * random.uniform(0.5, 1.0))  # noqa: S311
        if left_s <= 0 or self._sleep(pause_s):
            return False
        self.tries += 1
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        return True


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
    """
    backoff = None
    while True:
        try:
            result = action()
        except OSError as error:
            if error.errno not in FULL:
                raise
            if backoff is None:
                backoff = Backoff(retry_s, pause, LONGEST_PAUSE_WHEN_FULL_S)
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
