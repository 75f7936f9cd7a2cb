"""Draws sweep.png, the objective over the swept values: a panel for each key."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hydra.console.text import one_line
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.files import write_atomic
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective, best_first, comparable, describe_counts, swept
from ddp_hydra.sweep.summary_files import read
from ddp_hydra.sweep.tables import is_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)
DRAW_S = 30.0
"""How long a picture may take."""
HUGE = 1e30
"""Larger numbers, and numbers closer to 0 than its inverse, break matplotlib's axes."""
_MAX_PANELS, _PANELS_A_ROW, _MAX_TICKS, _LOG_FROM = 12, 3, 8, 100
_OVER = (JobState.failed, JobState.done)
JOB, BEST, FAILED = "#2f6db3", "#f2a900", "#c8372d"
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"], "font.size": 9, "axes.spines.right": False, "axes.spines.top": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e8ebee", "text.parse_math": False,
}  # fmt: skip


def draw(rows: Sequence[JobRow], objective: SweepObjective, folder: Path) -> bool:
    """Draw the objective over each swept key, but not over seeds; return whether there is a picture.

    The same rows give the same file. An error, such as that matplotlib is missing, is logged, and ends no sweep.
    """
    keys = list(dict.fromkeys(key for values in swept(rows).values() for key in values))
    keys = [key for key in keys if not is_seed(key)] or keys
    if len(rows) < 2 or not keys or not any(map(_has_value, rows)):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about letters that the font lacks
            from matplotlib import rc_context

            content = io.BytesIO()
            with rc_context(STYLE):
                _figure(best_first(rows, objective), objective, keys).savefig(content, format="png")
            write_atomic(folder / "sweep.png", content.getvalue())
    except ImportError:
        log.warning("there is no picture of the sweep without matplotlib: pip install 'ddp-hydra[plot]'")
        return False
    except Exception as error:  # an error of matplotlib
        log.warning("there is no picture of the sweep: %s", error)
        return False
    return True


def draw_at_end(pipe: Connection, objective: SweepObjective, folder: Path) -> None:
    """Import matplotlib, wait for a message, and draw the rows that the sweep has written."""
    with contextlib.suppress(Exception):  # `draw` says why
        import matplotlib.figure  # noqa: F401
    pipe.recv_bytes()
    with contextlib.suppress(ConfigError):  # sweep.json can't be read
        draw(read(folder), objective, folder)


def _figure(ordered: Sequence[JobRow], objective: SweepObjective, keys: list[str]) -> Figure:
    from matplotlib.figure import Figure

    given, shown, metric = swept(ordered), keys[:_MAX_PANELS], one_line(objective.metric, 40)
    columns = min(len(shown), _PANELS_A_ROW)
    lines = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(max(5.6, 4.1 * columns), 0.9 + 3.2 * lines), dpi=130, layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for axes, key in zip_longest(panels, shown):
        if key is None:
            axes.remove()
        else:
            _panel(axes, {number: given[number].get(key) for number in sorted(given)}, ordered, objective)
            axes.set_xlabel(one_line(key, 40))
    for axes in panels[: len(shown) : columns]:
        axes.set_ylabel(metric)
    best = next(filter(_has_value, ordered))
    verdict = f"best: job {best.number} with {metric} {best.objective:.5g} ({objective.better})"
    if not objective.ranks(ordered):
        verdict = f"no best: {'no direction was given' if objective.maximize is None else 'jobs have other data'}"
    omitted = f"; the first {_MAX_PANELS} of {len(keys)} keys" if len(keys) > _MAX_PANELS else ""
    title = f"{describe_counts(ordered)}\n{verdict}{omitted}"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
    return figure


def _panel(axes: Axes, values: Mapping[int, str | None], ordered: Sequence[JobRow], objective: SweepObjective) -> None:
    at, labels = positions(values)
    points = {row.number: (at[row.number], _value(row)) for row in ordered if _has_value(row)}
    done = [points[row.number] for row in ordered if row.number in points and row.state == JobState.done]
    others = [points[row.number] for row in ordered if row.number in points and row.state != JobState.done]
    failed = [at[row.number] for row in ordered if row.number not in points and row.state in _OVER]
    for drawn, label, color in ((done, "done", JOB), (others, "stopped, running or interrupted", "white")):
        if drawn:
            across, up = zip(*drawn, strict=True)
            axes.scatter(across, up, s=30, label=label, color=color, edgecolor=JOB, zorder=2)
    if objective.ranks(ordered):
        best = next(iter(points.values()))
        axes.scatter(*best, marker="*", s=200, label="the best", color=BEST, edgecolor="#5a3f00", zorder=4)
    if failed:
        bottom = axes.get_xaxis_transform()
        axes.scatter(failed, [0.025] * len(failed), marker="x", label="failed", color=FAILED, transform=bottom)
    # On a linear axis, a very high loss would flatten the others.
    if objective.maximize is False and needs_logarithm([value for _, value in points.values()]):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    numbers = sorted(set(at.values()))
    if labels:
        step = max(1, len(labels) // 16)
        axes.set_xticks(range(0, len(labels), step), labels[::step], rotation=20)
        return
    places = numbers
    if needs_logarithm(numbers):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        places = [math.log(number) for number in numbers]
    gap = min((after - before for before, after in pairwise(places)), default=0.0)
    if len(numbers) <= _MAX_TICKS and gap >= (places[-1] - places[0]) / 10:  # else labels would cover each other
        axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
        axes.set_xticks([], minor=True)


def _has_value(row: JobRow) -> bool:
    return row.state != JobState.failed and row.objective is not None and abs(row.objective) < HUGE


def _value(row: JobRow) -> float:
    assert row.objective is not None
    return row.objective if abs(row.objective) > 1 / HUGE else 0.0


def positions(values: Mapping[int, str | None]) -> tuple[dict[int, float], list[str]]:
    """Return the place of each job on the axis, and the labels of the axis; [] if all values are numbers."""
    found = {job: number for job, value in values.items() if isinstance(number := comparable(value), float)}
    if len(found) == len(values) and all(one == 0 or 1 / HUGE < abs(one) < HUGE for one in found.values()):
        return found, []
    places = {value: float(place) for place, value in enumerate(dict.fromkeys(values.values()))}
    labels = ["none" if value is None else one_line(value, 18) or "''" for value in places]
    return {job: places[value] for job, value in values.items()}, labels


def needs_logarithm(numbers: Sequence[float]) -> bool:
    return min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_FROM
