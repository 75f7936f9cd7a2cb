"""Report the figures of a benchmark: a table with the goal of each figure, `--json`, and `--check`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Goal:
    """Sets the goal of a figure.

    Args:
        limit: the bound.
        at_most: the figure may not be larger; otherwise it may not be smaller.
    """

    limit: float
    at_most: bool = False

    def met(self, value: float) -> bool:
        """Return whether a figure reaches it."""
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"


@dataclass(frozen=True)
class Figure:
    """Holds one line of the table.

    Args:
        name: what was measured.
        median: over the repeats, or the ratio of two medians.
        best: of the repeats, or the ratio of two bests.
        worst: of the repeats, or the ratio of two worsts.
        unit: s, samples/s, steps, or x for a ratio.
        goal: what the median shall reach; None where it is there to compare with.
        runs: the single measurements.
    """

    name: str
    median: float
    best: float
    worst: float
    unit: str
    goal: Goal | None = None
    runs: tuple[float, ...] = ()

    @property
    def met(self) -> bool:
        """Return whether it has no goal or reaches it."""
        return self.goal is None or self.goal.met(self.median)


@dataclass(frozen=True)
class Absent:
    """Holds a line of the table without a figure.

    Args:
        name: what was to be measured.
        why: in a sentence or the first line of an error.
        failed: it was tried; otherwise it was left out.
    """

    name: str
    why: str
    failed: bool = False

    @property
    def met(self) -> bool:
        """Return whether it did not fail."""
        return not self.failed

    @property
    def verdict(self) -> str:
        """The last column of its row."""
        return "failed" if self.failed else "left out"


Line = Figure | Absent


def times(name: str, runs: Sequence[float], goal: Goal | None = None, unit: str = "s") -> Figure:
    """Measured times, or what else shall be little: the best is the shortest."""
    return Figure(name, statistics.median(runs), min(runs), max(runs), unit, goal, tuple(runs))


def speeds(name: str, runs: Sequence[float]) -> Figure:
    """Measured speeds: the best is the highest."""
    return Figure(name, statistics.median(runs), max(runs), min(runs), "samples/s", runs=tuple(runs))


def value(name: str, number: float, goal: Goal | None = None, unit: str = "") -> Figure:
    """Return a figure that was measured once, or counted."""
    return Figure(name, number, number, number, unit, goal, (number,))


def ratio(name: str, over: Figure, under: Figure, goal: Goal | None = None) -> Figure:
    """Return the ratio of two figures: of their medians, their bests and their worsts."""
    return Figure(name, over.median / under.median, over.best / under.best, over.worst / under.worst, "x", goal)


def paired(name: str, over: Sequence[float], under: Sequence[float], goal: Goal | None = None) -> Figure:
    """Return the ratio of two speeds, measured side by side in each turn, so that drift of the machine affects both."""
    ratios = tuple(a / b for a, b in zip(over, under, strict=True))
    return Figure(name, statistics.median(ratios), max(ratios), min(ratios), "x", goal, ratios)


def main(description: str, measure: Callable[[int], Iterable[Figure]], repeats: int) -> None:
    """Run a benchmark as a command.

    Args:
        description: for `--help`.
        measure: takes the number of repeats, yields the figures.
        repeats: unless `--repeats` says otherwise.
    """
    parser = argparse.ArgumentParser(description=description)
    add_options(parser, repeats)
    arguments = parser.parse_args()
    check_options(parser, arguments)
    finish(list(measure(arguments.repeats)), arguments)


def add_options(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Add the options of every benchmark.

    Args:
        parser: of the command.
        repeats: unless `--repeats` says otherwise.
    """
    parser.add_argument("--repeats", type=int, default=repeats, help=f"runs of each side ({repeats})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the command if an option of `add_options` has a wrong value."""
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")


def finish(lines: Sequence[Line], arguments: argparse.Namespace) -> None:
    """Print the table; write `--json`; with `--check`, exit 1 where a goal is missed."""
    Console(width=None if sys.stdout.isatty() else 110).print(table(lines))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_dict(lines), indent=2) + "\n")
    missed = [line.name for line in lines if not line.met]
    if arguments.check and missed:
        sys.exit(f"missed: {'; '.join(missed)}")


def progress(text: str) -> None:
    """Say on stderr what was just measured, so that the table stays alone on stdout."""
    print(text, file=sys.stderr, flush=True)


def table(lines: Iterable[Line]) -> Table:
    """Return the lines as a table."""
    shown = Table("figure", title=machine())
    for heading in ("median", "best", "worst", "unit", "goal", ""):
        shown.add_column(heading, justify="right" if heading in ("median", "best", "worst") else "left")
    for line in lines:
        if isinstance(line, Absent):
            shown.add_row(escape(f"{line.name}: {line.why}"), "", "", "", "", "", f"[bold]{line.verdict}[/bold]")
            continue
        verdict = "" if line.goal is None else "ok" if line.met else "[bold]missed[/bold]"
        numbers = (digits(line.median), digits(line.best), digits(line.worst))
        shown.add_row(escape(line.name), *numbers, line.unit, "" if line.goal is None else str(line.goal), verdict)
    return shown


def digits(value: float) -> str:
    """Three decimals, fewer for large numbers; none for what was counted."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def as_dict(lines: Iterable[Line]) -> dict[str, object]:
    """Return the lines as JSON values."""
    return {
        "machine": machine(),
        "figures": [{**asdict(line), "met": line.met} for line in lines],
    }


def machine() -> str:
    """Describe the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.system()} {platform.machine()}, {cores} cores, Python {platform.python_version()}"
