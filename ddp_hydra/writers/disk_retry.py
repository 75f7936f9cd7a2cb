"""Retry writes while a disk is full or away."""

from __future__ import annotations

import errno
import logging
import threading

from ddp_hydra.errors import RecordError
from ddp_hydra.results import Record
from ddp_hydra.storage.files import cannot_write, passing
from ddp_hydra.storage.retry import Backoff
from ddp_hydra.writers.base import Writer

LONGEST_PAUSE_S = 2.0
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
        backoff = None
        while True:
            try:
                writer.write(record)
                break
            except Exception as error:
                obstacle = passing(error)
                if obstacle is None or self._is_spent:
                    raise
                what = f"{_CANNOT}{obstacle.filename or type(writer).__name__}"
                if backoff is None:  # not made before: the first try may have copied for minutes
                    backoff = Backoff(self._retry_s, self._give_up.wait, LONGEST_PAUSE_S)
                    self._warn(what, obstacle)
                if not backoff.wait():
                    self._is_spent = True
                    if isinstance(error, OSError):
                        error = cannot_write(type(writer).__name__, error)
                    raise RecordError(
                        f"{error}; it was tried {backoff.tries} times in {backoff.elapsed_s:.0f} s"
                    ) from obstacle
        if backoff is not None:
            log.warning("written, after %.0f s of retrying: %s", backoff.elapsed_s, what.removeprefix(_CANNOT))

    def _warn(self, what: str, obstacle: OSError) -> None:
        reason = (obstacle.strerror or str(obstacle)).lower()
        advice = _ADVICE.get(obstacle.errno or 0, "")
        log.warning("%s: %s; trying again for up to %g s%s", what, reason, self._retry_s, advice)
