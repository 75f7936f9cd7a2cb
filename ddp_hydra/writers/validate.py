"""Checks the fields of a record before a writer gets it: ranks are not trusted."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from ddp_hydra.checked import Count, Finite, Name, NonNegative
from ddp_hydra.errors import RecordError
from ddp_hydra.results import Record, check_path

Metrics = dict[Name, float | None]
_MOST_EDGES = 1025


class _Start(Struct):
    lines: list[str] | None = None
    total_steps: Count | None = None
    epochs: NonNegative | None = None
    world_size: Count | None = None


class _Metrics(Struct):
    metrics: Metrics
    epoch: NonNegative | None = None
    samples: NonNegative | None = None


class _Text(Struct):
    name: Name
    text: str


class _Image(Struct):
    name: Name
    png: str


class _Histogram(Struct):
    name: Name
    edges: Annotated[list[Finite], Meta(max_length=_MOST_EDGES)]
    counts: list[NonNegative]

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or sorted(self.edges) != self.edges:
            raise ValueError("edges must rise, and there must be one edge more than counts")


class _Checkpoint(Struct):
    step: Count
    epoch: NonNegative | None = None
    samples: NonNegative | None = None
    metrics: Metrics | None = None
    best: bool | None = None


class _File(Struct):
    path: Name
    size: Count
    sha256: str
    inline: str | None = None
    source: str | None = None
    checkpoint: _Checkpoint | None = None


class _Log(Struct):
    text: str


_DATA: dict[str, type] = {
    "start": _Start, "metrics": _Metrics, "text": _Text, "image": _Image, "histogram": _Histogram, "file": _File,
    "log": _Log, "end": dict[str, Any],
}  # fmt: skip


def check_record(record: Record) -> None:
    """Refuse a malformed record.

    Raises:
        RecordError: a field is missing, of the wrong type, or out of range, or a file's path leaves the run directory;
            the message names it.
    """
    try:
        msgspec.convert(asdict(record), Record)
        if record.kind not in _DATA:
            raise ValueError(f"the kinds that are written are {', '.join(_DATA)}")
        msgspec.convert(dict(record.data), _DATA[record.kind])
    except ValueError as error:
        given = f"rank {record.rank!a:.20} sent a malformed {record.kind!a:.40} record"
        raise RecordError(f"{given}: {error}") from None
    if record.kind == "file":
        check_path(record.data["path"])


def metric_values(record: Record) -> dict[str, float]:
    """Return a metrics record's values; null stands for NaN, which JSON cannot hold."""
    return {name: math.nan if value is None else float(value) for name, value in record.data["metrics"].items()}
