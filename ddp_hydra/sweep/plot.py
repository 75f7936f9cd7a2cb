"""Draws sweep.png, the objective over the swept values."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hydra.console.text import printable
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.files import write_atomic
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective, best_first, comparable, describe_counts, swept
from ddp_hydra.sweep.summary_files import read
from ddp_hydra.sweep.tables import SeedSummary, is_seed, repeated

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
_MAX_LINE, _MAX_LETTERS, _MAX_LABEL = 12, 40, 18
JOB, BEST, FAILED, GREY = "#2f6db3", "#f2a900", "#c8372d", "#5c6570"
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"], "font.size": 9, "axes.edgecolor": "#b8bec6", "axes.labelcolor": "#20262d",
    "axes.spines.right": False, "axes.spines.top": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e8ebee", "xtick.color": GREY, "ytick.color": GREY, "text.color": "#20262d",
    "text.parse_math": False, "figure.facecolor": "white",
}  # fmt: skip


def draw_saved(folder: Path, objective: SweepObjective) -> None:
    with contextlib.suppress(ConfigError):  # the disk is full, and the sweep has said so
        draw(read(folder), objective, folder)


def draw(rows: Sequence[JobRow], objective: SweepObjective, folder: Path) -> bool:
    """Draw the objective over each swept key; return whether there is a picture.

    If the sweep repeats seeds, a line from the mean by one standard deviation up and down shows each config. The same
    rows give the same file. An error, such as that matplotlib is missing, is logged, and ends no sweep.
    """
    keys = list(dict.fromkeys(key for values in swept(rows).values() for key in values))
    if repeated(rows, objective):
        keys = [key for key in keys if not is_seed(key)] or keys
    if len(rows) < 2 or not keys or not any(map(_has_value, rows)):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about letters that the font lacks
            from matplotlib import rc_context

            content = io.BytesIO()
            with rc_context(STYLE):
                _figure(rows, objective, keys).savefig(content, format="png")
            write_atomic(folder / "sweep.png", content.getvalue())
    except ImportError:
        log.warning("there is no picture of the sweep without matplotlib: pip install 'ddp-hydra[plot]'")
        return False
    except Exception as error:  # an error of matplotlib
        log.warning("there is no picture of the sweep: %s", error)
        return False
    return True


def _figure(rows: Sequence[JobRow], objective: SweepObjective, keys: list[str]) -> Figure:
    from matplotlib.figure import Figure

    given, over_seeds = swept(rows), repeated(rows, objective)
    shown = keys[:_MAX_PANELS]
    columns = 2 if len(shown) == 4 else min(len(shown), _PANELS_A_ROW)
    lines = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(max(5.6, 4.1 * columns), 0.9 + 3.2 * lines), dpi=130, layout="constrained")
    every = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for axes in every[len(shown) :]:
        axes.remove()
    for axes, key in zip(every, shown, strict=False):
        _panel(axes, {row.number: given[row.number].get(key) for row in rows}, rows, objective, over_seeds)
        axes.set_xlabel(short_text(key, 40))
    for axes in every[: len(shown) : columns]:
        axes.set_ylabel(short_text(objective.metric, 40))
    figure.suptitle(_title(rows, objective, len(keys), over_seeds), fontsize=10, x=0.01, ha="left")
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=8.5)
    return figure


def _title(rows: Sequence[JobRow], objective: SweepObjective, keys: int, over_seeds: Sequence[SeedSummary]) -> str:
    best, metric = _good(rows, objective)[0], short_text(objective.metric, 40)
    verdict = f"best: job {best.number} with {metric} {best.objective:.5g} ({objective.better})"
    if over_seeds and over_seeds[0].mean is not None:
        first = over_seeds[0]
        words = ", ".join(f"{key}={value}" for key, value in first.values.items()) or "the only config"
        spread = "" if first.sd is None else f" ± {first.sd:.2g}"
        verdict = f"best mean over seeds: {short_text(words, 60)} with {metric} {first.mean:.5g}{spread}"
    if not objective.ranks(rows):
        verdict = f"no best: {'no direction was given' if objective.maximize is None else 'jobs have other data'}"
    omitted = f"; the first {_MAX_PANELS} of {keys} keys" if keys > _MAX_PANELS else ""
    return f"{describe_counts(rows)}\n{verdict}{omitted}"


def _panel(
    axes: Axes,
    values: Mapping[int, str | None],
    rows: Sequence[JobRow],
    objective: SweepObjective,
    over_seeds: Sequence[SeedSummary],
) -> None:
    at, labels = positions(values)
    good = _good(rows, objective)
    means = [
        (at[one.jobs[0]], one.mean, one.sd or 0.0)
        for one in over_seeds
        if one.mean is not None and max(abs(one.mean), one.sd or 0.0) < HUGE
    ]
    bests: dict[float, float] = {}
    for place, value in [point[:2] for point in means] or [(at[row.number], _value(row)) for row in good]:
        bests.setdefault(place, value)
    if objective.ranks(rows) and not labels and len(bests) <= _MAX_LINE:
        axes.plot(*zip(*sorted(bests.items()), strict=True), color=JOB, alpha=0.35, linewidth=1.2, zorder=1)
    style: dict[str, Any]
    for is_done, label in ((True, "done"), (False, "stopped, running or interrupted")):
        drawn = [(at[row.number], _value(row)) for row in good if (row.state == JobState.done) == is_done]
        if drawn:
            color = JOB if is_done else "white"
            style = {"s": 30, "alpha": 0.75, "linewidth": 0.9, "color": color, "edgecolor": JOB}
            axes.scatter(*zip(*drawn, strict=True), zorder=2, label=label, **style)
    if means:
        across, up, spreads = zip(*means, strict=True)
        axes.errorbar(
            across, up, yerr=spreads, fmt="_", color="#20262d", markersize=9, elinewidth=1.1, capsize=3, zorder=3,
            label="mean ± sd over seeds",
        )  # fmt: skip
    if objective.ranks(rows):
        style = {"marker": "*", "s": 200, "color": BEST, "edgecolor": "#5a3f00", "linewidth": 0.8}
        axes.scatter(*next(iter(bests.items())), zorder=4, label="the best", **style)
    if failed := [at[row.number] for row in rows if row.state in _OVER and not _has_value(row)]:
        style = {"marker": "x", "s": 34, "color": FAILED, "linewidth": 1.6, "clip_on": False}
        bottom = axes.get_xaxis_transform()
        axes.scatter(failed, [0.025] * len(failed), transform=bottom, zorder=3, label="failed", **style)
    axes.margins(x=0.08, y=0.14)
    # On a linear axis, a very high loss would flatten the others.
    if objective.maximize is False and needs_logarithm([_value(row) for row in good]):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    _mark_numbers(axes, sorted(set(at.values()))) if not labels else _mark_texts(axes, labels)
    axes.tick_params(which="both", length=0)


def _mark_numbers(axes: Axes, numbers: Sequence[float]) -> None:
    is_log = needs_logarithm(numbers)
    if is_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(lambda *_: "")
    places = [math.log(number) for number in numbers] if is_log else numbers
    gap = min((after - before for before, after in pairwise(places)), default=0.0)
    if len(numbers) <= _MAX_TICKS and gap >= (places[-1] - places[0]) / 10:
        axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
        axes.set_xticks([], minor=True)


def _mark_texts(axes: Axes, labels: Sequence[str]) -> None:
    step = max(1, len(labels) // 16)
    axes.set_xticks(range(0, len(labels), step), labels[::step])
    if sum(map(len, labels[::step])) > _MAX_LETTERS:
        axes.tick_params(axis="x", labelrotation=20)


def _good(rows: Sequence[JobRow], objective: SweepObjective) -> list[JobRow]:
    return [row for row in best_first(rows, objective) if _has_value(row)]


def _has_value(row: JobRow) -> bool:
    return row.state != JobState.failed and row.objective is not None and abs(row.objective) < HUGE


def _value(row: JobRow) -> float:
    assert row.objective is not None
    return row.objective if abs(row.objective) > 1 / HUGE else 0.0


def positions(values: Mapping[int, str | None]) -> tuple[dict[int, float], list[str]]:
    numbers = {job: _number(value) for job, value in values.items()}
    found = {job: number for job, number in numbers.items() if number is not None}
    if len(found) == len(numbers):
        return found, []
    places = {value: float(place) for place, value in enumerate(dict.fromkeys(values.values()))}
    labels = ["none" if value is None else short_text(value) for value in places]
    return {job: places[value] for job, value in values.items()}, labels


def needs_logarithm(numbers: Sequence[float]) -> bool:
    return min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_FROM


def short_text(text: str, most: int = _MAX_LABEL) -> str:
    text = " ".join(printable(text).split()) or "''"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _number(value: str | None) -> float | None:
    number = comparable(value)
    return number if isinstance(number, float) and (number == 0 or 1 / HUGE < abs(number) < HUGE) else None
