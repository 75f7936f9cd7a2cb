"""Defines the protocol of a writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ddp_hydra.record import Record

Fetch = Callable[[Record, Path], None]
"""Copies the content of a file record's `source` to a path that does not exist yet."""


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
