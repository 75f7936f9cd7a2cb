"""Retry writes while a disk is full or away."""

from __future__ import annotations

import errno
import logging
import threading
import time

from ddp_hydra.errors import RecordError
from ddp_hydra.results import Record
from ddp_hydra.storage.files import cannot_write, passing
from ddp_hydra.writers.base import Writer

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
_CANNOT = "cannot write "
_ADVICE = {errno.ENOSPC: ": free some space there", errno.EDQUOT: ": free some of your quota there"}

log = logging.getLogger(__name__)


class DiskRetry:
    """Retry the write of a record while the disk's error may be temporary.

    After the first write that failed for `retry_s`, every error is raised at once.

    Args:
        retry_s: how long one write is retried; 0: not at all.
        give_up: an event that ends all waiting at once.
    """

    def __init__(self, retry_s: float, give_up: threading.Event) -> None:
        self._retry_s = retry_s
        self._give_up = give_up
        self._is_spent = retry_s <= 0

    def write(self, writer: Writer, record: Record) -> None:
        """Give `record` to `writer`, which must accept the same record again after an OSError.

        Raises:
            RecordError: the record cannot be written, and the error is not temporary or lasted too long.
        """
        tries, began, pause = 1, time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                writer.write(record)
                break
            except Exception as error:
                obstacle = passing(error)
                if obstacle is None or self._is_spent:
                    raise
                what = f"{_CANNOT}{obstacle.filename or type(writer).__name__}"
                if tries == 1:
                    began = time.monotonic()  # the first try may have copied for minutes
                    self._warn(what, obstacle)
                left_s = began + self._retry_s - time.monotonic()
                if left_s <= 0 or self._give_up.wait(min(pause, left_s)):
                    self._is_spent = True
                    if isinstance(error, OSError):
                        error = cannot_write(type(writer).__name__, error)
                    waited_s = time.monotonic() - began
                    raise RecordError(f"{error}; it was tried {tries} times in {waited_s:.0f} s") from obstacle
            tries, pause = tries + 1, min(2 * pause, LONGEST_PAUSE_S)
        if tries > 1:
            log.warning("written, after %.0f s of retrying: %s", time.monotonic() - began, what.removeprefix(_CANNOT))

    def _warn(self, what: str, obstacle: OSError) -> None:
        reason = (obstacle.strerror or str(obstacle)).lower()
        advice = _ADVICE.get(obstacle.errno or 0, "")
        log.warning("%s: %s; trying again for up to %g s%s", what, reason, self._retry_s, advice)
