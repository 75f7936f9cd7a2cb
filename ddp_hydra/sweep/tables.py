"""Format a sweep as a table: as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence

from ddp_hydra.console.text import plain
from ddp_hydra.sweep.rows import Objective, Row, State, best_first, data_of, describe_counts, swept

_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")
_MARKUP = re.compile(r"[\\`*\[\]<>|&~$]|(?<![^\W_])_|_(?![^\W_])")
_MAX_MESSAGE = 300


def csv_text(rows: Sequence[Row], objective: Objective | None) -> str:
    """Return a CSV table with one line per job, the best first."""
    overrides = swept(rows)
    keys = _keys(overrides.values())
    first = [objective.metric] if objective else []
    metrics = sorted({name for row in rows for name in row.metrics}.difference(first))
    head = ["number", "state", *keys, *first, *metrics, "steps", "workers", "wall_s", "folder", "message"]
    target = io.StringIO()
    table = csv.writer(target, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    table.writerow(map(_cell, head))
    for row in best_first(rows, objective):
        values = [overrides[row.number].get(key) for key in keys]
        numbers = [row.objective] * len(first) + [row.metrics.get(name) for name in metrics]
        rest = [row.step, row.workers, round(row.wall_s, 3), row.folder, row.message]
        table.writerow(map(_cell, [row.number, row.shown_state, *values, *numbers, *rest]))
    return target.getvalue()


def markdown_text(rows: Sequence[Row], objective: Objective | None) -> str:
    """Return a Markdown page: the number of jobs in each state, and a table of the jobs, the best first."""
    overrides = swept(rows)
    keys = _keys(overrides.values())
    metrics = [objective.metric] if objective else []
    head = ["job", "state", *keys, *metrics, "steps", "time", "message"]
    kinds = ["--:", ":--", *(":--" for _ in keys), *("--:" for _ in metrics), "--:", "--:", ":--"]
    lines = [f"# Sweep of {describe_counts(rows)}", ""]
    if objective:
        lines += [_order_of(rows, objective), ""]
    lines += [_line(map(_markup, head)), _line(kinds)]
    ordered = best_first(rows, objective)
    bests = _bests(ordered, objective)
    for row in ordered:
        number = "" if row.objective is None or not math.isfinite(row.objective) else f"{row.objective:.5g}"
        if row.number in bests:
            number = f"**{number}**"
        steps = "" if row.step is None else f"{row.step}"
        if row.total_steps:
            steps = f"{row.step or 0}/{row.total_steps}"
        values = [_markup(overrides[row.number].get(key, "")) for key in keys]
        message = _markup(textwrap.shorten(_one_line(row.message), _MAX_MESSAGE, placeholder=" …"))
        took = _clock(row.wall_s) if row.wall_s and math.isfinite(row.wall_s) else ""
        lines.append(_line([str(row.number), row.shown_state, *values, *[number] * len(metrics), steps, took, message]))
    return "\n".join(lines) + "\n"


def _order_of(rows: Sequence[Row], objective: Objective) -> str:
    """Return a sentence about the order of the jobs."""
    metric = _markup(objective.metric)
    if objective.maximize is None:
        return (
            f"Ordered by number, because it is not known whether a higher {metric} is better. "
            "Set `hydra.launcher.direction=maximize` (or `minimize`)."
        )
    if objective.ranks(rows):
        return f"Best first by {metric}: {objective.better}."
    return f"Grouped by data set, the best first in each group by {metric}: {objective.better}."


def _bests(ordered: Sequence[Row], objective: Objective | None) -> set[int]:
    """Return the number of the best job of each data set; none if the direction is not known."""
    if objective is None or objective.maximize is None:
        return set()
    data, bests = data_of(ordered), dict[object, int]()
    for row in ordered:
        if row.state is not State.failed and row.objective is not None and math.isfinite(row.objective):
            bests.setdefault(data[row.number], row.number)
    return set(bests.values())


def _keys(overrides: Iterable[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(key for values in overrides for key in values))


def _one_line(text: str) -> str:
    return " ".join(plain(text).split())


def _cell(value: object) -> object:
    """Return a value as one line that no spreadsheet reads as a formula."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, str):
        return value
    text = _one_line(value)
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", text, re.ASCII) is not None


def _markup(text: str) -> str:
    """Escape a text, so that Markdown shows it unchanged."""
    return _MARKUP.sub(r"\\\g<0>", _one_line(text))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
