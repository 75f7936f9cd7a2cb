"""Caches the rows of a folder, so that thousands of runs are listed without reading their files.

The index is a file in the user's cache folder. It may be removed at any time, and a damaged one is as good as none.
Of two commands that write it at once, the last one wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import fields
from pathlib import Path

from ddp_hydra.data.user_cache import private_folder, user_cache
from ddp_hydra.errors import RecordError
from ddp_hydra.runs.describe import Row
from ddp_hydra.storage.files import write_atomic

Stamp = list[int]
Entries = dict[str, tuple[Stamp, Row]]
VERSION = 1
_MOST_BYTES = 2**28
_NAMES = [one.name for one in fields(Row) if one.name != "run"]


class Index:
    """The index of one folder, whose file is read only once.

    Args:
        root: the folder, as it was typed: rows carry their paths in the same way.
    """

    def __init__(self, root: str) -> None:
        self.root = os.path.normpath(root)
        real = os.path.realpath(root)
        name = hashlib.sha256(f"{real}\0{self.root}".encode(errors="surrogateescape")).hexdigest()[:32]
        self.name = f"{name}.json"
        self._kept: Entries | None = None

    def read(self) -> Entries:
        """Return stamp and row of each run, by its path; {} if there is no index, or none that can be used."""
        if self._kept is not None:
            return self._kept
        try:
            path = self._path()
            if path.stat().st_size > _MOST_BYTES:
                return {}
            content = json.loads(path.read_bytes())
            if content["version"] != VERSION or content["columns"] != _NAMES:
                return {}
            return {
                run: (stamp, Row(run, **dict(zip(_NAMES, values, strict=True))))
                for run, stamp, values in content["rows"]
            }
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return {}

    def write(self, entries: Entries, earlier: Entries) -> None:
        """Write the index, unless nothing has changed. Where that is not possible, listing is only slower.

        Args:
            entries: all that there are.
            earlier: as read before.
        """
        self._kept = entries
        if {run: stamp for run, (stamp, _) in entries.items()} == {run: stamp for run, (stamp, _) in earlier.items()}:
            return
        content = {
            "version": VERSION,
            "columns": _NAMES,
            "rows": [[run, stamp, [vars(row)[name] for name in _NAMES]] for run, (stamp, row) in entries.items()],
        }
        with contextlib.suppress(OSError, ValueError, RecordError):
            write_atomic(self._path(), json.dumps(content, separators=(",", ":")).encode(), durable=False)

    def _path(self) -> Path:
        return private_folder(user_cache() / "runs") / self.name
