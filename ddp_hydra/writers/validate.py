"""Check the fields of a record before a writer gets it: ranks are not trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddp_hydra.errors import RecordError
from ddp_hydra.results import Record

_NUMBER = (int, float)
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "start": {
        "lines": list,
        "total_steps": int,
        "epochs": _NUMBER,
        "steps_per_epoch": int,
        "world_size": int,
    },
    "metrics": {"metrics": dict, "epoch": _NUMBER, "samples": _NUMBER},
    "text": {"name": str, "text": str},
    "image": {"name": str, "png": str},
    "histogram": {"name": str, "edges": list, "counts": list},
    "file": {
        "path": str,
        "size": int,
        "sha256": str,
        "inline": str,
        "source": str,
        "checkpoint": dict,
    },
    "log": {"text": str},
    "end": {},
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "metrics": ("metrics",),
    "text": ("name", "text"),
    "image": ("name", "png"),
    "histogram": ("name", "edges", "counts"),
    "file": ("path", "size", "sha256"),
    "log": ("text",),
}
_CHECKPOINT: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "epoch": _NUMBER,
    "samples": _NUMBER,
    "metrics": dict,
    "best": bool,
}


def check_record(record: Record) -> None:
    """Refuse a malformed record.

    Raises:
        RecordError: a field is missing, of the wrong type, or out of range; the message names it.
    """
    _check_number(record, "rank", record.rank, 1e6)
    _check_number(record, "attempt", record.attempt, 1e6)
    _check_number(record, "step", record.step, 2**63 - 1)
    if not isinstance(record.time_s, _NUMBER) or not 0 <= record.time_s < 1e11:
        raise _malformed(record, "time_s", record.time_s)
    fields = _FIELDS.get(record.kind)
    if fields is None:
        raise _malformed(record, "kind", record.kind)
    for name in _REQUIRED.get(record.kind, ()):
        if record.data.get(name) is None:
            raise _malformed(record, name, None)
    _check_fields(record, record.data, fields)
    if record.kind == "metrics":
        _check_metrics(record, record.data["metrics"])
    if record.kind == "start" and not all(isinstance(line, str) for line in record.data.get("lines") or ()):
        raise _malformed(record, "lines", record.data["lines"])
    if record.kind == "histogram":
        _check_histogram(record)
    if record.kind == "file" and record.data.get("checkpoint") is not None:
        checkpoint = record.data["checkpoint"]
        _check_fields(record, checkpoint, _CHECKPOINT)
        _check_number(record, "checkpoint.step", checkpoint.get("step", -1), 2**63 - 1)
        _check_metrics(record, checkpoint.get("metrics") or {})


def metric_values(record: Record) -> dict[str, float]:
    """Return a metrics record's values; null stands for NaN, which JSON cannot hold."""
    return {name: math.nan if value is None else float(value) for name, value in record.data["metrics"].items()}


def _check_fields(record: Record, data: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]]) -> None:
    for name, kind in fields.items():
        value = data.get(name)
        if value is None:
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _malformed(record, name, value)
        if isinstance(value, _NUMBER) and not 0 <= value < 2**63:  # no NaN either
            raise _malformed(record, name, value)
        if isinstance(value, str) and name in ("name", "path") and not _is_name(value):
            raise _malformed(record, name, value)


def _check_metrics(record: Record, metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_name(name):
            raise _malformed(record, "metrics", name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, _NUMBER):
            raise _malformed(record, name, value)
        try:
            float(value)
        except OverflowError:
            raise _malformed(record, name, value) from None


def _check_histogram(record: Record) -> None:
    edges, counts = record.data["edges"], record.data["counts"]
    for name, numbers in (("edges", edges), ("counts", counts)):
        if not all(type(number) in _NUMBER and math.isfinite(number) for number in numbers) or len(numbers) > 1025:
            raise _malformed(record, name, numbers)
    if len(edges) != len(counts) + 1 or sorted(edges) != edges or any(number < 0 for number in counts):
        raise _malformed(record, "counts", counts)


def _check_number(record: Record, name: str, value: Any, limit: float) -> None:
    if value is None and name == "step":
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise _malformed(record, name, value)


def _is_name(text: str) -> bool:
    """Tell whether a text is neither empty nor has lone surrogates: JSON can hold them, but no file can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return bool(text)


def _malformed(record: Record, name: str, value: Any) -> RecordError:
    got = "is missing" if value is None else f"cannot be {value!a:.100}"
    return RecordError(f"rank {record.rank!a:.20} sent a malformed {record.kind!r} record: {name!r} {got}")
