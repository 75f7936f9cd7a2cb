"""Shows the jobs of a sweep as tables: on the terminal, as CSV, as Markdown; sums up jobs over their seeds."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ddp_hydra.checked import finite_number
from ddp_hydra.console.text import duration, one_line, printable
from ddp_hydra.sweep.rows import (
    JobRow,
    JobState,
    SweepObjective,
    best_first,
    comparable,
    data_of,
    describe_counts,
    group_of,
    score,
    swept,
)


@dataclass(frozen=True)
class SeedSummary:
    """The objective of one config over its seeds.

    Args:
        values: the swept keys and values of the config, without the seed.
        jobs: the numbers of its jobs.
        n: how many of them count: they are done and have a finite objective.
        sd: their sample standard deviation; None for fewer than two.
        best: None if it is not known what is better.
    """

    values: dict[str, str]
    jobs: list[int]
    n: int
    mean: float | None
    sd: float | None
    best: float | None
    worst: float | None


def is_seed(key: str) -> bool:
    return key == "seed" or key.endswith(".seed")


def repeated(rows: Sequence[JobRow], objective: SweepObjective) -> list[SeedSummary]:
    """Return one entry for each config, the best mean first; [] if no config is repeated with another seed.

    Configs with other data are grouped, because their values cannot be compared.
    """
    values = swept(rows)
    if not any(is_seed(key) for given in values.values() for key in given):
        return []
    configs: dict[tuple[tuple[str, str], ...], list[JobRow]] = {}
    for row in rows:
        given = tuple((key, value) for key, value in values[row.number].items() if not is_seed(key))
        configs.setdefault(given, []).append(row)
    if all(len(same) < 2 for same in configs.values()):
        return []
    data = data_of(rows, objective)
    places = {value: place for place, value in enumerate(dict.fromkeys(data.values()))}
    found = [(places[data[same[0].number]], _summed(dict(given), same, objective)) for given, same in configs.items()]
    if objective.maximize is not None:
        found.sort(key=lambda pair: (pair[0], -score(pair[1].mean, objective.maximize)))
    return [entry for _, entry in found]


def _summed(values: dict[str, str], rows: Sequence[JobRow], objective: SweepObjective) -> SeedSummary:
    counted = [row.objective for row in rows if row.state == JobState.done and row.objective is not None]
    ordered = sorted(counted, reverse=bool(objective.maximize))
    is_known = bool(ordered) and objective.maximize is not None
    return SeedSummary(
        values=values,
        jobs=[row.number for row in rows],
        n=len(counted),
        mean=statistics.fmean(counted) if counted else None,
        sd=statistics.stdev(counted) if len(counted) > 1 else None,
        best=ordered[0] if is_known else None,
        worst=ordered[-1] if is_known else None,
    )


_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")
_MARKUP = re.compile(r"[\\`*\[\]<>|&~$]|(?<![^\W_])_|_(?![^\W_])")
_MAX_MESSAGE = 300


def csv_text(rows: Sequence[JobRow], objective: SweepObjective) -> str:
    overrides = swept(rows)
    keys = _keys(overrides.values())
    metrics = sorted({name for row in rows for name in row.metrics} - {objective.metric})
    labels = _keys(row.labels for row in rows)
    of_jobs = [objective.metric, *metrics, "steps", "workers", "wall_s", "folder", "message"]
    lines: list[list[object]] = [["number", "state", *labels, *keys, *of_jobs]]
    for row in best_first(rows, objective):
        values = [*map(row.labels.get, labels), *map(overrides[row.number].get, keys)]
        numbers = [row.objective, *map(row.metrics.get, metrics)]
        rest = [row.step, row.workers, round(row.wall_s, 3), row.folder, row.message]
        lines.append([row.number, row.shown_state, *values, *numbers, *rest])
    return _csv(lines)


def seeds_csv_text(repeated: Sequence[SeedSummary], objective: SweepObjective) -> str:
    keys = _keys(entry.values for entry in repeated)
    numbers = [f"{objective.metric} {word}" for word in ("mean", "sd", "best", "worst")]
    lines: list[list[object]] = [[*keys, *numbers, "n", "jobs"]]
    for entry in repeated:
        values = [entry.values.get(key) for key in keys]
        jobs = " ".join(map(str, entry.jobs))
        lines.append([*values, entry.mean, entry.sd, entry.best, entry.worst, entry.n, jobs])
    return _csv(lines)


def _csv(lines: Iterable[Iterable[object]]) -> str:
    target = io.StringIO()
    table = csv.writer(target, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    table.writerows(map(_cell, line) for line in lines)
    return target.getvalue()


def markdown_text(rows: Sequence[JobRow], objective: SweepObjective, repeated: Sequence[SeedSummary] = ()) -> str:
    """Return a page with tables of the jobs. Jobs with other data or another model have a table of their own."""
    lines = [f"# Sweep of {describe_counts(rows)}", "", _order_of(rows, objective), ""]
    if repeated:
        lines += ["## Over seeds", "", *_seeds_table(repeated, objective), ""]
    overrides, of_row = swept(rows), group_of(rows, objective)
    ordered = best_first(rows, objective)
    groups: dict[tuple[tuple[str, str], ...], list[JobRow]] = {}
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
    ordered: Sequence[JobRow], keys: Sequence[str], overrides: Mapping[int, dict[str, str]], objective: SweepObjective
) -> Iterator[str]:
    labels = _keys(row.labels for row in ordered)
    head = ["job", "state", *labels, *keys, objective.metric, "steps", "time", "message"]
    kinds = ["--:", ":--", *(":--" for _ in (*labels, *keys)), "--:", "--:", "--:", ":--"]
    yield _line(map(_markup, head))
    yield _line(kinds)
    best = _best(ordered, objective)
    for row in ordered:
        number = objective_text(row, 5)
        if row is best:
            number = f"**{number}**"
        steps = "" if row.step is None else f"{row.step}"
        if row.total_steps:
            steps = f"{row.step or 0}/{row.total_steps}"
        values = [_markup(row.labels.get(label, "")) for label in labels]
        values += [_markup(overrides[row.number].get(key, "")) for key in keys]
        message = _markup(one_line(row.message, _MAX_MESSAGE))
        took = duration(row.wall_s or None)
        yield _line([str(row.number), row.shown_state, *values, number, steps, took, message])


def objective_text(row: JobRow, digits: int = 4) -> str:
    values: list[Any] = row.value if row.objective is None and isinstance(row.value, list) else [row.objective]
    return ", ".join(f"{one:.{digits}g}" for one in values if finite_number(one) is not None)


def _seeds_table(repeated: Sequence[SeedSummary], objective: SweepObjective) -> Iterator[str]:
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


def _order_of(rows: Sequence[JobRow], objective: SweepObjective) -> str:
    metric = _markup(objective.metric)
    if any(isinstance(row.value, list) for row in rows):
        return f"Ordered by number: {metric} holds several objectives, in the order in which jobs return them."
    if objective.maximize is None:
        return (
            f"Ordered by number: is a higher {metric} better? Set `hydra.launcher.direction=maximize` (or `minimize`)."
        )
    groups = group_of(rows, objective)
    if len(set(groups.values())) < 2:
        return f"Best first by {metric}: {objective.better}."
    other = "model" if objective.ranks(rows) else "data set and model"
    words = f"Grouped by {other}, the best first in each group by {metric}: {objective.better}."
    best = _best(best_first(rows, objective), objective) if objective.ranks(rows) else None
    if best is None:
        return words
    return f"{words} The best of all is job {best.number} with {_markup(_words(groups[best.number]))}."


def _words(group: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{key}={value}" for key, value in group)


def _best(ordered: Sequence[JobRow], objective: SweepObjective) -> JobRow | None:
    if objective.maximize is None:
        return None
    last = max((_generation(row) for row in ordered), default=0)  # of a population
    latest = [row for row in ordered if _generation(row) == last]
    return next((row for row in latest if row.state is not JobState.failed and row.objective is not None), None)


def _generation(row: JobRow) -> int:
    return int(row.labels.get("generation", 0))


def _keys(overrides: Iterable[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(key for values in overrides for key in values))


def _cell(value: object) -> object:
    """Return a value as one line that no spreadsheet reads as a formula."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, str):
        return value
    text = one_line(value)
    return f"'{text}" if text.startswith(_FORMULA) and not isinstance(comparable(text), float) else text


def _markup(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", one_line(text))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


REFRESH_S = 0.5
_WIDE = 1000
"""Columns of a file or pipe, where nothing is folded."""
STYLES = {
    JobState.done: "green",
    JobState.stopped: "cyan",
    JobState.paused: "cyan",
    JobState.failed: "red",
    JobState.interrupted: "yellow",
    JobState.running: "bold",
}


class LiveTable:
    """Shows jobs while they run."""

    def __init__(self, objective: SweepObjective, console: Console | None = None) -> None:
        self.objective = objective
        self.console = console or Console(stderr=True, highlight=False)
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live: Live | None = None
        self.drawn = -math.inf
        self.printed: dict[int, JobState] = {}

    def show(self, rows: Sequence[JobRow]) -> None:
        if not self.is_live:
            self._print_changes(rows)
        elif time.monotonic() - self.drawn >= REFRESH_S:
            self.drawn = time.monotonic()
            if self.live is None:  # no refresh thread, because this process forks
                self.live = Live(console=self.console, auto_refresh=False, transient=True)
                self.live.start()
            self.live.update(self._table(rows, most=max(5, self.console.height - 6)), refresh=True)

    def close(self, rows: Sequence[JobRow], lines: Sequence[str]) -> None:
        """End a batch of jobs; show all of them and `lines`, if there are any."""
        if self.live is not None:
            self.live.stop()
            self.live = None
        if not self.is_live:
            self._print_changes(rows)
        if lines:
            self.console.print(self._table(rows), width=None if self.is_live else _WIDE)
        for line in lines:
            self.console.print(Text(line), soft_wrap=True)

    def _print_changes(self, rows: Sequence[JobRow]) -> None:
        changed = [row for row in rows if row.state not in (JobState.queued, self.printed.get(row.number))]
        values = swept(rows) if changed else {}
        for row in changed:
            self.printed[row.number] = row.state
            ended = sum(other.state.has_ended for other in rows)
            words = [f"job {row.number} {row.state.value}", *(f"{k}={v}" for k, v in values[row.number].items())]
            if row.state.has_ended and (value := objective_text(row)):
                words.append(f"-> {self.objective.metric} {value}")
            words += [f"({printable(row.message)})"] if row.message else []
            words += [f"[{ended}/{len(rows)}]"] if row.state.has_ended else []
            self.console.print(Text(printable(" ".join(words))), soft_wrap=True)

    def _table(self, rows: Sequence[JobRow], most: int | None = None) -> Group:
        values = swept(rows)
        keys = list(dict.fromkeys(key for own in values.values() for key in own))
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for name in ("job", "state", *keys, "at", self.objective.metric, "workers", "time", "left"):
            table.add_column(
                Text(printable(name)), justify="left" if name in ("state", *keys) else "right", overflow="fold"
            )
        ordered = best_first(rows, self.objective)
        if most is not None and len(ordered) > most:
            running = [row for row in ordered if row.state == JobState.running]
            ordered = (running + [row for row in ordered if row.state != JobState.running])[:most]
        for row in ordered:
            table.add_row(
                str(row.number),
                Text(row.shown_state, style=STYLES.get(row.state, "dim")),
                *(Text(printable(values[row.number].get(key, ""))) for key in keys),
                _position(row),
                objective_text(row),
                str(row.workers) if row.workers else "",
                duration(row.wall_s or None),
                duration(row.eta_s if row.state == JobState.running else None),
            )
        if most is None:  # the closing lines count the jobs
            return Group(table)
        hidden = len(rows) - len(ordered)
        note = describe_counts(rows) + (f"; {hidden} not shown" if hidden > 0 else "")
        return Group(table, Text(note, style="dim"))


def _position(row: JobRow) -> str:
    if row.epoch is not None and row.epochs:
        return f"epoch {row.epoch:g}/{row.epochs:g}"
    if row.step is not None:
        return f"step {row.step}" + (f"/{row.total_steps}" if row.total_steps else "")
    return ""
