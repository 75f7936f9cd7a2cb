"""Writes and reads rows of predictions on their way to the client: plain data, never pickles."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.rank import return_values

NAME = "parts/part-{:08d}.rows"
"""Path of the file of a part, by its number."""
_LENGTH = 8


def write(file: IO[bytes], columns: Mapping[str, Any]) -> None:
    """Append some rows to a file.

    Args:
        file: open for writing.
        columns: name -> array (rows, ...) or list of that length.
    """
    if unfit := [name for name in columns if not is_name(name)]:
        raise ConfigError(f"the task predicts {unfit[0]!r}: give a column a name without slashes")
    data = return_values.encode(dict(columns))
    file.write(len(data).to_bytes(_LENGTH, "big") + data)


def is_name(name: Any) -> bool:
    """Tell whether a column can be called so: by a text that is not a path."""
    return isinstance(name, str) and bool(name) and name.isprintable() and not {"/", "\\"} & set(name)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, as many at a time as were written at a time.

    Raises:
        RecordError: the file holds something else. It comes from a rank, so it can be anything.
    """
    error = RecordError(f"{path.name} holds no rows of predictions")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while head := file.read(_LENGTH):
            length = int.from_bytes(head, "big")
            if length > size - file.tell():
                raise error
            columns = return_values.decode(file.read(length))
            is_table = isinstance(columns, dict) and all(is_name(name) for name in columns)
            if not is_table or not all(hasattr(values, "__len__") for values in columns.values()):
                raise error
            yield columns
