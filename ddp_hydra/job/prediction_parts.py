"""Receives the parts of a prediction from the ranks, so that one that is interrupted goes on; merges them in order."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.rank import rows
from ddp_hydra.record import File, Record, Rows
from ddp_hydra.storage.files import place, remove_parts, write_atomic, writing
from ddp_hydra.writers.base import Fetch
from ddp_hydra.writers.logs import LogWriter
from ddp_hydra.writers.receive_file import FileReceiver

PLAN = "plan.json"
_PART = re.compile(r"parts/part-(\d{8})\.rows", re.ASCII)


class Parts:
    """Keeps the parts of one prediction in a folder.

    Args:
        folder: made if it is missing.
        plan: what is predicted: checkpoint, changes, code. Parts of another plan are refused.
        overwrite: remove the parts of another plan.

    Attributes:
        samples: of the data set; None until a rank has told it, of an iterable one at its end.
        length: rows of each part but the last.

    Raises:
        ConfigError: the folder holds parts of another prediction.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any], overwrite: bool = False) -> None:
        self.folder, self.plan = folder, {"version": 1, **plan}
        self.samples: int | None = None
        self.length = 0
        self.logs = LogWriter(folder)
        found = self.read_plan()
        if found and found["plan"] != self.plan:
            if not overwrite:
                raise ConfigError(
                    f"{folder} holds a part of another prediction, with another checkpoint, data set, config or code: "
                    "give overwrite=true to drop it, or another out="
                )
            shutil.rmtree(folder / "parts", ignore_errors=True)
            (folder / PLAN).unlink()
            found = {}
        if found:
            self.samples, self.length = found["samples"], found["rows"]
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        place(folder, "parts/x")
        remove_parts(folder / "parts")

    def read_plan(self) -> dict[str, Any]:
        """Return the content of the folder's plan; {} if it has none."""
        try:
            content = json.loads((self.folder / PLAN).read_text())
            return content if {"plan", "samples", "rows"} <= content.keys() else {}
        except (OSError, ValueError, AttributeError):
            return {}

    @property
    def total(self) -> int:
        """The number of parts; 0 as long as it is not known."""
        return -(-self.samples // self.length) if self.samples else 0

    def path(self, part: int) -> Path:
        """Return the file of a part."""
        return self.folder / rows.NAME.format(part)

    def done(self) -> list[int]:
        """Return the numbers of the parts that are there."""
        found = (_PART.fullmatch(f"parts/{path.name}") for path in (self.folder / "parts").glob("*.rows"))
        numbers = sorted(int(named[1]) for named in found if named)
        return [part for part in numbers if not self.total or part < self.total]

    def rows_of(self, part: int) -> int:
        """Return how many rows a part must have."""
        return self.length if self.samples is None else min(self.length, self.samples - part * self.length)

    def receive(self, record: Record, fetch: Fetch) -> None:
        """Take a record of a rank.

        Raises:
            RecordError: its file is none of the parts.
            ConfigError: the data set has changed since the prediction began.
        """
        if isinstance(record.data, Rows):
            self.begin(record.data.samples, record.data.length)
        elif isinstance(record.data, File):
            self.store(record, record.data.path, fetch)
        else:
            self.logs.write(record)

    def begin(self, samples: int | None, length: int) -> None:
        """Note how many rows there are, or how many each part has if their number is not known yet."""
        samples = self.samples if samples is None else samples
        if self.samples is not None and (samples, length) != (self.samples, self.length):
            raise ConfigError(
                f"the data set has {samples:,} samples in batches that make parts of {length}, and {self.samples:,} in "
                f"parts of {self.length} when {self.folder} was begun: give overwrite=true to begin again"
            )
        self.samples, self.length = samples, length
        content = {"plan": self.plan, "samples": samples, "rows": length}
        write_atomic(self.folder / PLAN, json.dumps(content, indent=1).encode())

    def store(self, record: Record, path: str, fetch: Fetch) -> None:
        """Put the file of a part in place."""
        named = _PART.fullmatch(path)
        if named is None or not self.length or (self.total and int(named[1]) >= self.total):
            raise RecordError(f"rank {record.rank} sent {path!r:.80}, which is not a part of {self.total}")
        receiver = FileReceiver(fetch)
        try:
            receiver.receive(record, self.path(int(named[1])))
        finally:
            receiver.drop()

    def merged(self) -> Iterator[dict[str, Any]]:
        """Yield all rows in order, a few at a time, with their index in front.

        Raises:
            RecordError: a part is missing, or is not as long as it must be.
        """
        names: list[str] = []
        for part in range(self.total):
            begin = part * self.length
            end = begin + self.rows_of(part)
            for columns in rows.read(self.path(part)):
                lengths = {len(values) for values in columns.values()}
                names = names or list(columns)
                if list(columns) != names:
                    raise RecordError(
                        f"the predictions of row {begin} have the columns {', '.join(columns)}, and those before "
                        f"{', '.join(names)}: predict must return the same ones for each batch"
                    )
                if len(lengths) != 1 or begin + (size := lengths.pop()) > end or "index" in columns:
                    raise RecordError(
                        f"{self.path(part)} does not hold rows {begin} to {end}: remove it, and try again"
                    )
                yield {"index": np.arange(begin, begin + size), **columns}
                begin += size
            if begin != end:
                raise RecordError(f"{self.path(part)} ends with row {begin} of {end}: remove it, and try again")

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder)
