"""Waiting for a disk that is full or away."""

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
    """Has a record written again while what keeps it from the disk may pass.

    It waits in vain only once: after that, every error is raised at once.

    Args:
        retry_s: how long one write is tried again; 0 for not at all.
        give_up: ends all waiting at once, when set.
    """

    def __init__(self, retry_s: float, give_up: threading.Event) -> None:
        self._retry_s = retry_s
        self._give_up = give_up
        self._is_spent = retry_s <= 0

    def write(self, writer: Writer, record: Record) -> None:
        """Have `writer` take `record`; it must bear to get the same one again after an OSError.

        Raises:
            RecordError: it cannot be written, and that does not pass, or not in time.
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
            log.warning("written after all, after %.0f s: %s", time.monotonic() - began, what.removeprefix(_CANNOT))

    def _warn(self, what: str, obstacle: OSError) -> None:
        reason = (obstacle.strerror or str(obstacle)).lower()
        advice = _ADVICE.get(obstacle.errno or 0, "")
        log.warning("%s: %s; trying again for up to %g s%s", what, reason, self._retry_s, advice)
