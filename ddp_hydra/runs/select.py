"""Filters the rows of runs, and orders them."""

from __future__ import annotations

import difflib
import fnmatch
import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from ddp_hydra.errors import ConfigError
from ddp_hydra.runs.describe import STATUSES, RunRow

_COMPARISON = re.compile(r"([^<>=\s]+)\s*(>=|<=|>|<)\s*(.+)")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
SORTS = ("when", "duration", "steps", "status", "folder", "objective")
"""Orders, besides the names of metrics."""
OBJECTIVE = "objective"


@dataclass(frozen=True)
class Comparison:
    """Compares a metric with a number.

    Args:
        metric: its name, or "objective" for the one that the run goes by.
        sign: >, >=, < or <=.
        limit: the number.
    """

    metric: str
    sign: str
    limit: float

    def holds(self, row: RunRow) -> bool:
        value = value_of(row, self.metric)
        return value is not None and _OPERATORS[self.sign](value, self.limit)


def comparison(word: str) -> Comparison | None:
    found = _COMPARISON.fullmatch(word)
    if found is None:
        return None
    try:
        return Comparison(found[1], found[2], float(found[3]))
    except ValueError:
        raise ConfigError(f"{word!r}: a metric is compared with a number, 'val/accuracy>0.9'") from None


@dataclass(frozen=True)
class Filter:
    """Chooses runs: those that match each argument, and at least one word of a list.

    Args:
        status: such as "done,failed"; "" for any, as for the others.
        tag: tags, of which * stands for any characters, as in `model` and `data`.
        model: options of the group `model`.
        data: options of the group `data`.
        since: a date, "2026-11-01" or "2026-11-01T10:30", or a time up to now, "7d".
        comparisons: of metrics.
    """

    status: str = ""
    tag: str = ""
    model: str = ""
    data: str = ""
    since: str = ""
    comparisons: Sequence[Comparison] = ()

    def choose(self, rows: Sequence[RunRow]) -> list[RunRow]:
        for word in _words(self.status):
            if word not in STATUSES:
                raise ConfigError(f"status={word}: give {', '.join(STATUSES)}, several with commas")
        since = begin_of(self.since) if self.since else None
        for compared in self.comparisons:
            check_metric(compared.metric, rows)
        return [row for row in rows if self._matches(row, since)]

    def _matches(self, row: RunRow, since: float | None) -> bool:
        return (
            (not self.status or row.status in _words(self.status))
            and _one_of(self.tag, row.tags)
            and _one_of(self.model, [row.model])
            and _one_of(self.data, [row.data])
            and (since is None or (row.started is not None and row.started >= since))
            and all(compared.holds(row) for compared in self.comparisons)
        )


def begin_of(text: str) -> float:
    """Return a time in seconds since 1970, from a local date or from "7d" for seven days ago."""
    if found := _AGO.fullmatch(text):
        return time.time() - float(found[1]) * _SECONDS[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"since={text}: give a date, 2026-11-01 or 2026-11-01T10:30, or 7d, 12h, 30m") from None


def value_of(row: RunRow, metric: str) -> float | None:
    return row.value if metric == OBJECTIVE else row.metrics.get(metric)


def check_metric(metric: str, rows: Sequence[RunRow], others: Sequence[str] = ()) -> None:
    if not rows or metric == OBJECTIVE or any(metric in row.metrics for row in rows):
        return
    known = sorted({name for row in rows for name in row.metrics})
    near = difflib.get_close_matches(metric, [*others, *known], 8, 0.3) or known[:8]
    allowed = ", ".join(dict.fromkeys([*others, OBJECTIVE, *near]))
    raise ConfigError(f"{metric}: no run has this metric; there are {allowed}")


def ordered(rows: Sequence[RunRow], by: str) -> list[RunRow]:
    """Order rows: the newest, longest, farthest or best first; by status or folder, from a to z."""
    if by in ("status", "folder"):
        return sorted(rows, key=lambda row: (row.status if by == "status" else "", row.run))
    if by in ("when", "duration", "steps"):
        name = {"when": "started", "duration": "wall_s", "steps": "step"}[by]
        return sorted(rows, key=lambda row: (-(getattr(row, name) or 0.0), row.run))
    check_metric(by, rows, SORTS)

    def key(row: RunRow) -> tuple[bool, str, float, str]:
        value = value_of(row, by)
        if value is None:
            return True, "", 0.0, row.run
        # Different objectives can't be compared.
        return False, row.objective if by == OBJECTIVE else "", -value if _more_is_better(row, by) else value, row.run

    return sorted(rows, key=key)


def _more_is_better(row: RunRow, metric: str) -> bool:
    if metric in (OBJECTIVE, row.objective) and row.maximize is not None:
        return row.maximize
    from ddp_hydra.config import objective

    try:
        return objective.direction_of(row.objective if metric == OBJECTIVE else metric) == "maximize"
    except ConfigError:
        return True


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _one_of(wanted: str, found: Sequence[str]) -> bool:
    return not wanted or any(fnmatch.fnmatchcase(one, pattern) for one in found for pattern in _words(wanted))
