"""Formats a sweep as tables: as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddp_hydra.console.text import duration, plain
from ddp_hydra.sweep.rows import DATA_KEYS, Objective, Row, State, best_first, describe_counts, group_of, swept
from ddp_hydra.sweep.seeds import Repeated

_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")
_MARKUP = re.compile(r"[\\`*\[\]<>|&~$]|(?<![^\W_])_|_(?![^\W_])")
_MAX_MESSAGE = 300


def csv_text(rows: Sequence[Row], objective: Objective) -> str:
    """Return a CSV table with one line per job, the best first."""
    overrides = swept(rows)
    keys = _keys(overrides.values())
    metrics = sorted({name for row in rows for name in row.metrics} - {objective.metric})
    labels = _keys(row.labels for row in rows)
    of_jobs = [objective.metric, *metrics, "steps", "workers", "wall_s", "folder", "message"]
    head = ["number", "state", *labels, *keys, *of_jobs]
    target = io.StringIO()
    table = csv.writer(target, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    table.writerow(map(_cell, head))
    for row in best_first(rows, objective):
        values = [*map(row.labels.get, labels), *map(overrides[row.number].get, keys)]
        numbers = [row.objective, *map(row.metrics.get, metrics)]
        rest = [row.step, row.workers, round(row.wall_s, 3), row.folder, row.message]
        table.writerow(map(_cell, [row.number, row.shown_state, *values, *numbers, *rest]))
    return target.getvalue()


def seeds_csv_text(repeated: Sequence[Repeated], objective: Objective) -> str:
    """Return a CSV table with one line per config, the one with the best mean over its seeds first."""
    keys = _keys(entry.values for entry in repeated)
    head = [*keys, *(f"{objective.metric} {word}" for word in ("mean", "sd", "best", "worst")), "n", "jobs"]
    target = io.StringIO()
    table = csv.writer(target, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    table.writerow(map(_cell, head))
    for entry in repeated:
        values = [entry.values.get(key) for key in keys]
        numbers = [entry.mean, entry.sd, entry.best, entry.worst, entry.n]
        table.writerow(map(_cell, [*values, *numbers, " ".join(map(str, entry.jobs))]))
    return target.getvalue()


def markdown_text(rows: Sequence[Row], objective: Objective, repeated: Sequence[Repeated] = ()) -> str:
    """Return a Markdown page: the number of jobs in each state, and tables of the jobs, the best first.

    Jobs with other data or another model have a table of their own.

    Args:
        rows: of a sweep.
        objective: the metric that jobs are compared by.
        repeated: the configs of the sweep over their seeds, if it repeats seeds.
    """
    lines = [f"# Sweep of {describe_counts(rows)}", "", _order_of(rows, objective), ""]
    if repeated:
        lines += ["## Over seeds", "", *_seeds_table(repeated, objective), ""]
    overrides, of_row = swept(rows), group_of(rows)
    ordered = best_first(rows, objective)
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in ordered:
        groups.setdefault(of_row[row.number], []).append(row)
    in_headings = {key for group in groups for key, _ in group}
    keys = [key for key in _keys(overrides.values()) if len(groups) < 2 or key not in in_headings]
    for group, inside in groups.items():
        if len(groups) > 1:
            lines += [f"## {_markup(_words(group)) or 'other jobs'}", ""]
        elif repeated:
            lines += ["## Jobs", ""]
        lines += [*_table(inside, keys, overrides, objective), ""]
    return "\n".join(lines[:-1]) + "\n"


def _table(
    ordered: Sequence[Row], keys: Sequence[str], overrides: Mapping[int, dict[str, str]], objective: Objective
) -> Iterator[str]:
    """Yield the lines of a table of jobs that can be compared."""
    labels = _keys(row.labels for row in ordered)
    head = ["job", "state", *labels, *keys, objective.metric, "steps", "time", "message"]
    kinds = ["--:", ":--", *(":--" for _ in (*labels, *keys)), "--:", "--:", "--:", ":--"]
    yield _line(map(_markup, head))
    yield _line(kinds)
    best = _best(ordered, objective)
    for row in ordered:
        number = "" if row.objective is None or not math.isfinite(row.objective) else f"{row.objective:.5g}"
        if row is best:
            number = f"**{number}**"
        steps = "" if row.step is None else f"{row.step}"
        if row.total_steps:
            steps = f"{row.step or 0}/{row.total_steps}"
        values = [_markup(row.labels.get(label, "")) for label in labels]
        values += [_markup(overrides[row.number].get(key, "")) for key in keys]
        message = _markup(textwrap.shorten(_one_line(row.message), _MAX_MESSAGE, placeholder=" …"))
        took = duration(row.wall_s or None)
        yield _line([str(row.number), row.shown_state, *values, number, steps, took, message])


def _seeds_table(repeated: Sequence[Repeated], objective: Objective) -> Iterator[str]:
    """Yield the lines of the table of the configs over their seeds."""
    keys = _keys(entry.values for entry in repeated)
    head = [*keys, f"{objective.metric}, mean ± sd", "best", "worst", "n", "jobs"]
    yield _line(map(_markup, head))
    yield _line([":--"] * len(keys) + ["--:"] * 4 + [":--"])
    for entry in repeated:
        values = [_markup(entry.values.get(key, "")) for key in keys]
        mean = _short(entry.mean) + (f" ± {entry.sd:.2g}" if entry.sd is not None else "")
        count = f"{entry.n}" if entry.n == len(entry.jobs) else f"{entry.n} of {len(entry.jobs)}"
        jobs = ", ".join(map(str, entry.jobs))
        yield _line([*values, mean, _short(entry.best), _short(entry.worst), count, jobs])


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.5g}"


def _order_of(rows: Sequence[Row], objective: Objective) -> str:
    """Return a sentence about the order of the jobs."""
    metric = _markup(objective.metric)
    if objective.maximize is None:
        return (
            f"Ordered by number, because it is not known whether a higher {metric} is better. "
            "Set `hydra.launcher.direction=maximize` (or `minimize`)."
        )
    groups = group_of(rows)
    if len(set(groups.values())) < 2:
        return f"Best first by {metric}: {objective.better}."
    is_data = not objective.ranks(rows)
    other = "data set" if is_data else "model"
    if is_data and any(key not in DATA_KEYS for group in groups.values() for key, _ in group):
        other = "data set and model"
    words = f"Grouped by {other}, the best first in each group by {metric}: {objective.better}."
    best = None if is_data else _best(best_first(rows, objective), objective)
    if best is None:
        return words
    return f"{words} The best of all is job {best.number} with {_markup(_words(groups[best.number]))}."


def _words(group: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{key}={value}" for key, value in group)


def _best(ordered: Sequence[Row], objective: Objective) -> Row | None:
    """Return the best of some jobs that can be compared; None if the direction is not known."""
    if objective.maximize is None:
        return None
    good = (row for row in ordered if row.state is not State.failed and row.objective is not None)
    return next((row for row in good if math.isfinite(row.objective or 0.0)), None)


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
