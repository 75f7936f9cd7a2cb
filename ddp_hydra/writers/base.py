"""What a writer is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ddp_hydra.results import Record

Fetch = Callable[[Record, Path], None]
"""Brings the complete content of a file record's `source` to a path that does not exist yet."""


class Writer(Protocol):
    """Turns records into files. It gets every record and picks the kinds that it knows."""

    def write(self, record: Record) -> None:
        """Take one record, already checked by the handler."""

    def close(self) -> None:
        """End well; called once, also after a failure."""
