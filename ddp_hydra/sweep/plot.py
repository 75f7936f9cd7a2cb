"""Draw sweep.png: the objective over the swept values."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hydra.console.text import plain
from ddp_hydra.storage.files import write_atomic
from ddp_hydra.sweep.rows import Objective, Row, State, best_first, describe_counts, swept

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)
_JOB, _BEST, _FAILED, _GREY = "#2f6db3", "#f2a900", "#c8372d", "#5c6570"
_LOG_FROM = 100
_MAX_PANELS, _PANELS_A_ROW, _MAX_TICKS, _MAX_GRID = 12, 3, 8, 24
_MAX_LINE, _MAX_LETTERS, _MAX_WORDS = 12, 40, 18
_NEARLY_FULL = 0.75
_HUGE = 1e30
"""Larger numbers, and numbers closer to 0 than its inverse, break matplotlib's axes."""
_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"], "font.size": 9, "axes.edgecolor": "#b8bec6", "axes.labelcolor": "#20262d",
    "axes.spines.right": False, "axes.spines.top": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e8ebee", "xtick.color": _GREY, "ytick.color": _GREY, "text.color": "#20262d",
    "text.parse_math": False, "figure.facecolor": "white",
}  # fmt: skip


def draw(rows: Sequence[Row], objective: Objective | None, path: Path) -> bool:
    """Draw the objective over each swept key, and as a map over two of them.

    Args:
        rows: of a sweep.
        objective: the metric that jobs are compared by.
        path: of the image.

    Returns:
        Whether it was drawn: there are values, and matplotlib is installed.
    """
    keys = list(dict.fromkeys(key for values in swept(rows).values() for key in values))
    if objective is None or len(rows) < 2 or not keys or not any(map(_has_value, rows)):
        return False
    try:
        import matplotlib
    except ImportError:
        log.warning("there is no picture of the sweep without matplotlib: pip install 'ddp-hydra[plot]'")
        return False
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the font lacks
        try:
            write_atomic(path, _png(rows, objective, keys))
            return True
        except Exception as error:  # an error of matplotlib must not end the sweep
            log.warning("there is no picture of the sweep: %s", error)
            return False


@dataclass(frozen=True)
class Scale:
    """Place the values of one key on an axis: numbers by value, texts side by side.

    Args:
        name: the key.
        values: by job number; None if a job has none.
    """

    name: str
    values: dict[int, str | None]

    @property
    def numbers(self) -> dict[int, float]:
        """Return the numbers by job number; {} if not all values are numbers."""
        numbers = {job: _number(value) for job, value in self.values.items()}
        found = {job: number for job, number in numbers.items() if number is not None}
        return found if len(found) == len(numbers) else {}

    @property
    def categories(self) -> list[str | None]:
        """Return all values: numbers in order, texts as they were given."""
        numbers = self.numbers
        jobs = sorted(self.values, key=lambda job: numbers.get(job, 0.0))
        return list(dict.fromkeys(self.values[job] for job in jobs))

    @property
    def positions(self) -> dict[int, float]:
        """Return the position on the axis by job number."""
        places = {value: float(place) for place, value in enumerate(self.categories)}
        return self.numbers or {job: places[value] for job, value in self.values.items()}

    @property
    def labels(self) -> list[str]:
        """Return the labels of the categories."""
        return ["none" if value is None else _shown(value) for value in self.categories]


def _png(rows: Sequence[Row], objective: Objective, keys: list[str]) -> bytes:
    from matplotlib.figure import Figure

    given = swept(rows)
    scales = [Scale(key, {row.number: given[row.number].get(key) for row in rows}) for key in keys]
    has_map = len(scales) == 2 and _is_grid(*scales)
    panels = min(len(scales), _MAX_PANELS) + has_map
    columns = 2 if panels == 4 else min(panels, _PANELS_A_ROW)
    lines = math.ceil(panels / columns)
    figure = Figure(figsize=(max(5.6, 4.1 * columns), 0.9 + 3.2 * lines), dpi=130, layout="constrained")
    every = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in every[panels:]:
        axes.remove()
    first = every[0]
    for axes, scale in zip(every, scales[:_MAX_PANELS], strict=False):
        if axes is not first:
            axes.sharey(first)
        _panel(axes, scale, rows, objective)
    for number, axes in enumerate(every[: panels - has_map]):
        if number % columns == 0:
            axes.set_ylabel(_shown(objective.metric, 40))
        else:
            axes.tick_params(labelleft=False)
    if has_map:
        _map(every[panels - 1], scales, rows, objective)
    figure.suptitle(_title(rows, objective, len(keys)), fontsize=10, x=0.01, ha="left")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=8.5)
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def _title(rows: Sequence[Row], objective: Objective, keys: int) -> str:
    best = _good(rows, objective)[0]
    verdict = f"best: job {best.number} with {_shown(objective.metric, 40)} {best.objective:.5g} ({objective.better})"
    if not objective.ranks(rows):
        verdict = f"no best: {'no direction was given' if objective.maximize is None else 'jobs have other data'}"
    omitted = f"; the first {_MAX_PANELS} of {keys} keys" if keys > _MAX_PANELS else ""
    return f"{describe_counts(rows)}\n{verdict}{omitted}"


def _panel(axes: Axes, scale: Scale, rows: Sequence[Row], objective: Objective) -> None:
    """Draw a point for each job, and a line through the best job of each value."""
    at = scale.positions
    good = _good(rows, objective)
    bests: dict[float, float] = {}
    for row in good:
        bests.setdefault(at[row.number], _value(row))
    if objective.ranks(rows) and scale.numbers and len(bests) <= _MAX_LINE:
        places = sorted(bests)
        axes.plot(places, [bests[place] for place in places], color=_JOB, alpha=0.35, linewidth=1.2, zorder=1)
    for is_done, label in ((True, "done"), (False, "running or interrupted")):
        shown = [row for row in good if (row.state == State.done) == is_done]
        if shown:
            axes.scatter(
                [at[row.number] for row in shown], [_value(row) for row in shown], s=30, alpha=0.75, linewidth=0.9,
                color=_JOB if is_done else "white", edgecolor=_JOB, zorder=2, label=label,
            )  # fmt: skip
    if objective.ranks(rows):
        _star(axes, at[good[0].number], _value(good[0]), 200)
    failed = [at[row.number] for row in rows if _is_lost(row)]
    if failed:
        bottom = axes.get_xaxis_transform()
        axes.scatter(
            failed, [0.025] * len(failed), transform=bottom, marker="x", s=34, color=_FAILED, linewidth=1.6, zorder=3,
            clip_on=False, label="failed",
        )  # fmt: skip
    axes.margins(y=0.14)
    if _log_values(good, objective):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plainly)
    axes.set_xlabel(_shown(scale.name, 40))
    _mark(axes, scale)
    axes.tick_params(which="both", length=0)


def _mark(axes: Axes, scale: Scale) -> None:
    """Set scale, limits and ticks of the axis of the swept values."""
    numbers = sorted(set(scale.numbers.values()))
    if not numbers:
        _mark_texts(axes, scale)
        return
    is_log = _spans(numbers)
    places = [math.log(number) for number in numbers] if is_log else numbers
    margin = 0.08 * (places[-1] - places[0]) or 0.5
    if is_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_plainly)
        axes.xaxis.set_minor_formatter(lambda *_: "")
        axes.set_xlim(math.exp(places[0] - margin), math.exp(places[-1] + margin))
    else:
        axes.set_xlim(places[0] - margin, places[-1] + margin)
    gap = min((after - before for before, after in pairwise(places)), default=0.0)
    if len(numbers) <= _MAX_TICKS and gap >= (places[-1] - places[0]) / 10:
        axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
        axes.set_xticks([], minor=True)


def _mark_texts(axes: Axes, scale: Scale) -> None:
    labels = scale.labels
    step = max(1, len(labels) // 16)
    axes.set_xticks(range(0, len(labels), step), labels[::step])
    if sum(map(len, labels[::step])) > _MAX_LETTERS:
        for label in axes.get_xticklabels():
            label.set(rotation=30, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.5, len(labels) - 0.5)


def _map(axes: Axes, scales: list[Scale], rows: Sequence[Row], objective: Objective) -> None:
    """Draw a cell for each pair of values with the objective of its best job."""
    across, up = sorted(scales, key=lambda scale: -len(scale.categories))
    columns = {value: place for place, value in enumerate(across.categories)}
    lines = {value: place for place, value in enumerate(up.categories)}
    cells = [[math.nan] * len(columns) for _ in lines]
    for row in reversed(best_first(rows, objective)):
        x, y = columns[across.values[row.number]], lines[up.values[row.number]]
        if _has_value(row):
            cells[y][x] = _value(row)
        elif _is_lost(row):
            axes.scatter(x, y, marker="x", s=40, color=_FAILED, linewidth=1.6, zorder=0)
    image = axes.imshow(
        cells, cmap="viridis_r" if objective.maximize is False else "viridis", origin="lower", aspect="auto", zorder=1,
        norm="log" if _log_values(rows, objective) else "linear",
    )  # fmt: skip
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, format=_plainly)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", length=0)
    norm: Any = image.norm
    if len(columns) <= _MAX_TICKS and len(lines) <= _MAX_TICKS:
        for y, line in enumerate(cells):
            for x, value in enumerate(line):
                if not math.isnan(value):
                    shade = 1 - norm(value) if objective.maximize is False else norm(value)
                    color = "black" if shade > 0.6 else "white"
                    axes.text(x, y, f"{value:.3g}", ha="center", va="center", color=color, fontsize=8)
    best = _good(rows, objective)[0].number
    if objective.ranks(rows):
        _star(axes, columns[across.values[best]], lines[up.values[best]] + 0.3, 110)
    _mark_texts(axes, across)
    axes.set_yticks(range(len(lines)), up.labels)
    axes.set_ylim(-0.5, len(lines) - 0.5)
    axes.set_xlabel(_shown(across.name, 40))
    axes.set_ylabel(_shown(up.name, 40))
    axes.grid(visible=False)
    axes.tick_params(which="both", length=0)


def _star(axes: Axes, x: float, y: float, size: int) -> None:
    axes.scatter(x, y, marker="*", s=size, color=_BEST, edgecolor="#5a3f00", linewidth=0.8, zorder=4, label="the best")


def _is_grid(one: Scale, other: Scale) -> bool:
    """Return whether nearly every pair of values has a job."""
    sizes = len(one.categories), len(other.categories)
    pairs = {(one.values[job], other.values[job]) for job in one.values}
    return min(sizes) >= 2 and max(sizes) <= _MAX_GRID and len(pairs) >= _NEARLY_FULL * sizes[0] * sizes[1]


def _good(rows: Sequence[Row], objective: Objective) -> list[Row]:
    return [row for row in best_first(rows, objective) if _has_value(row)]


def _has_value(row: Row) -> bool:
    return row.state != State.failed and row.objective is not None and abs(row.objective) < _HUGE


def _is_lost(row: Row) -> bool:
    return row.state == State.failed or (row.state == State.done and not _has_value(row))


def _value(row: Row) -> float:
    assert row.objective is not None
    return row.objective if abs(row.objective) > 1 / _HUGE else 0.0


def _log_values(rows: Sequence[Row], objective: Objective) -> bool:
    """Return whether to use a logarithmic axis: on a linear one, a very high loss would flatten the others."""
    return objective.maximize is False and _spans([_value(row) for row in rows if _has_value(row)])


def _spans(numbers: Sequence[float]) -> bool:
    return min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_FROM


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if number == 0 or 1 / _HUGE < abs(number) < _HUGE else None


def _plainly(value: float, _: Any = None) -> str:
    return f"{value:g}"


def _shown(text: str, most: int = _MAX_WORDS) -> str:
    text = " ".join(plain(text).split()) or "''"
    return text if len(text) <= most else f"{text[: most - 1]}…"
