"""Gives a job's records to its writers; retries writes while a disk is full or away."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, Self

from ddp_hydra.errors import RecordError
from ddp_hydra.record import Metrics, Record, RolledBack
from ddp_hydra.results import finite
from ddp_hydra.run_state import Status, Summary
from ddp_hydra.storage.files import cannot_write, open_run_dir, passing
from ddp_hydra.storage.retry import Backoff
from ddp_hydra.writers.files import CheckpointWriter, Fetch, FileWriter, JsonLinesWriter, LogWriter
from ddp_hydra.writers.run_dir import StatusWriter


class Writer(Protocol):
    """Turns records into files. A writer gets every record, and picks the kinds that it knows."""

    def write(self, record: Record) -> None:
        """Take one record that the handler has checked.

        Raises:
            OSError: it could not be written. Where that may pass, as on a full disk, the handler gives the record
                again, so what was written of it must not count twice.
            RecordError: it cannot be written at all.
        """

    def close(self) -> None:
        """Finish; the handler calls this once, also after a failure."""


LONGEST_PAUSE_S = 2.0
_ADVICE = {errno.ENOSPC: ": free some space there", errno.EDQUOT: ": free some of your quota there"}

log = logging.getLogger(__name__)


class ResultsHandler:
    """Gives each record of a job to every writer, and notes in the summary what rank 0 logged last.

    A write is retried for `retry_s` while the disk is full or away; `give_up` ends that at once. Call it from one
    thread. Leaving its `with` block closes all writers, also when one of them fails. An interrupt in it also ends their
    waiting for a full disk or a bucket that does not answer.
    """

    def __init__(
        self,
        writers: Iterable[Writer],
        retry_s: float = 0.0,
        give_up: threading.Event | None = None,
        summary: Summary | None = None,
    ) -> None:
        self.writers = list(writers)
        self.give_up = give_up or threading.Event()
        self.summary = summary or Summary(status="failed")
        self._retry_s, self._is_spent = retry_s, retry_s <= 0
        self._attempt: int | None = None

    def handle(self, record: Record) -> None:
        data, summary = record.data, self.summary
        if isinstance(data, Metrics) and record.rank == 0:
            summary.metrics.update(finite(data.metrics))
            if record.step is not None:  # a number may be logged for an earlier step
                summary.steps = max(record.step, (summary.steps or 0) if record.attempt == self._attempt else 0)
                self._attempt = record.attempt
            summary.samples = summary.samples if data.samples is None else data.samples
        elif isinstance(data, RolledBack) and record.rank == 0:
            summary.steps = record.step or 0
        self._each(lambda writer: self._write(writer, record))

    def close(self) -> None:
        """Close every writer, then raise the first error if there is one. A second call does nothing."""
        try:
            self._each(lambda writer: writer.close())
        finally:
            self.writers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.give_up.set()
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and the results could not be closed: {failure}")

    def _each(self, call: Callable[[Writer], None]) -> None:
        first: Exception | None = None
        for writer in self.writers:
            try:
                call(writer)
            except OSError as error:
                first = first or cannot_write(type(writer).__name__, error)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _write(self, writer: Writer, record: Record) -> None:
        """Give a record to a writer, and again after an OSError, as long as the disk's error may be temporary.

        After the first write that failed for `retry_s`, every error is raised at once.
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
                what = obstacle.filename or type(writer).__name__
                if backoff is None:  # not made before: the first try may have copied for minutes
                    backoff = Backoff(self._retry_s, self.give_up.wait, LONGEST_PAUSE_S)
                    reason, advice = obstacle.strerror or str(obstacle), _ADVICE.get(obstacle.errno or 0, "")
                    said = "cannot write %s: %s; trying again for up to %g s%s"
                    log.warning(said, what, reason.lower(), self._retry_s, advice)
                if not backoff.wait():
                    self._is_spent = True
                    if isinstance(error, OSError):
                        error = cannot_write(type(writer).__name__, error)
                    raise RecordError(
                        f"{error}; it was tried {backoff.tries} times in {backoff.elapsed_s:.0f} s"
                    ) from obstacle
        if backoff is not None:
            log.warning("written, after %.0f s of retrying: %s", backoff.elapsed_s, what)


def default_writers(
    run_dir: str | Path,
    fetch: Fetch | None = None,
    *,
    keep: int | None = 3,
    keep_every: int | None = None,
    is_stored: bool = False,
    mirror: str | None = None,
    retry_s: float = 60.0,
    give_up: threading.Event | None = None,
    tensorboard: bool = True,
    progress: bool = True,
    status: Status | None = None,
) -> list[Writer]:
    """Return the writers of a run directory, which is made if it is missing.

    Args:
        fetch: copies files from the ranks' hosts; None if every file comes inline.
        keep, keep_every, is_stored: see `CheckpointWriter`.
        mirror, retry_s, give_up: see `start_mirror`; None: no mirror.
        status: what status.json says from the beginning; it is kept up to date.
    """
    folder = open_run_dir(run_dir)
    writers: list[Writer] = [LogWriter(folder)]
    if tensorboard:
        from ddp_hydra.writers.tensorboard import TensorBoardWriter

        writers.append(TensorBoardWriter(folder))  # before the next one removes lines that it reads
    writers += [
        JsonLinesWriter(folder),
        FileWriter(folder, fetch),
        CheckpointWriter(folder, fetch, keep, keep_every, is_stored),
    ]
    if mirror:
        from ddp_hydra.writers.checkpoint_mirror import start_mirror

        writers.append(start_mirror(folder, mirror, retry_s, give_up))
    writers.append(StatusWriter(folder, status))
    if progress:
        from ddp_hydra.writers.progress import ProgressWriter

        writers.append(ProgressWriter())
    return writers
