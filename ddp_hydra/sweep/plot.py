"""Draws sweep.png, the objective over the swept values, in a process of its own: nothing waits for it."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hydra import forked
from ddp_hydra.console.text import printable
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.files import write_atomic
from ddp_hydra.sweep.forked_process import ForkedProcess
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective, best_first, comparable, describe_counts, swept
from ddp_hydra.sweep.summary_files import read
from ddp_hydra.sweep.tables import SeedSummary, is_seed, repeated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)
PAUSE_S = 20.0
"""Minimum seconds between two pictures. The last batch of jobs is always drawn."""
DRAW_S = 30.0
"""How long a picture may take."""
NICE = 10
"""Niceness of the process that imports matplotlib: jobs go first."""
HUGE = 1e30
"""Larger numbers, and numbers closer to 0 than its inverse, break matplotlib's axes."""
_MAX_PANELS, _PANELS_A_ROW, _MAX_TICKS = 12, 3, 8
_MAX_LINE, _MAX_LETTERS, _MAX_LABEL = 12, 40, 18
_LOG_FROM = 100
JOB, BEST, FAILED, GREY = "#2f6db3", "#f2a900", "#c8372d", "#5c6570"
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"], "font.size": 9, "axes.edgecolor": "#b8bec6", "axes.labelcolor": "#20262d",
    "axes.spines.right": False, "axes.spines.top": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e8ebee", "xtick.color": GREY, "ytick.color": GREY, "text.color": "#20262d",
    "text.parse_math": False, "figure.facecolor": "white",
}  # fmt: skip


class Plotter:
    """Has sweep.json drawn after batches of jobs; sweepers may have hundreds of them."""

    def __init__(self, folder: Path, objective: SweepObjective) -> None:
        self.folder, self.objective = folder, objective
        self.process: ForkedProcess | None = None

    def prepare(self) -> None:
        """Start the process that will draw. It imports matplotlib while the first jobs wait for the import of torch."""
        self.process = self.process or ForkedProcess(self._serve)

    def draw(self) -> None:
        self.prepare()
        self._send(is_last=False)

    def finish(self) -> None:
        if self.process is not None:
            self._send(is_last=True)
            self.process.process.join(DRAW_S)
            self.process.end()

    def _send(self, is_last: bool) -> None:
        assert self.process is not None
        with contextlib.suppress(OSError):  # it has ended
            self.process.pipe.send(is_last)

    def _serve(self, pipe: Connection) -> None:
        os.nice(NICE)
        forked.pause_garbage()
        with contextlib.suppress(Exception):  # `draw` says what is wrong
            for name in ("figure", "backends.backend_agg"):
                importlib.import_module(f"matplotlib.{name}")
        forked.resume_garbage()
        drawn, is_wanted, is_last = -math.inf, False, False
        while is_wanted or not is_last:
            if is_wanted and (is_last or time.monotonic() - drawn >= PAUSE_S):
                is_wanted = False
                with contextlib.suppress(ConfigError):  # the disk is full, and the sweep has said so
                    draw(read(self.folder), self.objective, self.folder)
                drawn = time.monotonic()
            elif pipe.poll(1.0):
                is_last = pipe.recv()
                is_wanted |= not is_last


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
    scales = [Scale(key, {row.number: given[row.number].get(key) for row in rows}) for key in keys]
    panels = min(len(scales), _MAX_PANELS)
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
        _panel(axes, scale, rows, objective, over_seeds)
    for number, axes in enumerate(every[:panels]):
        if number % columns == 0:
            axes.set_ylabel(short_text(objective.metric, 40))
        else:
            axes.tick_params(labelleft=False)
    figure.suptitle(_title(rows, objective, len(keys), over_seeds), fontsize=10, x=0.01, ha="left")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=8.5)
    return figure


def _title(rows: Sequence[JobRow], objective: SweepObjective, keys: int, over_seeds: Sequence[SeedSummary]) -> str:
    best, metric = _good(rows, objective)[0], short_text(objective.metric, 40)
    verdict = f"best: job {best.number} with {metric} {best.objective:.5g} ({objective.better})"
    if over_seeds and over_seeds[0].mean is not None:
        first = over_seeds[0]
        spread = "" if first.sd is None else f" ± {first.sd:.2g}"
        verdict = f"best mean over seeds: {short_text(_words(first), 60)} with {metric} {first.mean:.5g}{spread}"
    if not objective.ranks(rows):
        verdict = f"no best: {'no direction was given' if objective.maximize is None else 'jobs have other data'}"
    omitted = f"; the first {_MAX_PANELS} of {keys} keys" if keys > _MAX_PANELS else ""
    return f"{describe_counts(rows)}\n{verdict}{omitted}"


def _words(config: SeedSummary) -> str:
    return ", ".join(f"{key}={value}" for key, value in config.values.items()) or "the only config"


def _panel(
    axes: Axes, scale: Scale, rows: Sequence[JobRow], objective: SweepObjective, over_seeds: Sequence[SeedSummary]
) -> None:
    at = scale.positions
    good = _good(rows, objective)
    means = [(at[one.jobs[0]], one.mean, one.sd) for one in over_seeds if one.mean is not None and _is_drawn(one)]
    bests: dict[float, float] = {}
    for place, value in [place[:2] for place in means] or [(at[row.number], _value(row)) for row in good]:
        bests.setdefault(place, value)
    if objective.ranks(rows) and scale.numbers and len(bests) <= _MAX_LINE:
        places = sorted(bests)
        axes.plot(places, [bests[place] for place in places], color=JOB, alpha=0.35, linewidth=1.2, zorder=1)
    for is_done, label in ((True, "done"), (False, "stopped, running or interrupted")):
        drawn = [row for row in good if (row.state == JobState.done) == is_done]
        if drawn:
            axes.scatter(
                [at[row.number] for row in drawn], [_value(row) for row in drawn], s=30, alpha=0.75, linewidth=0.9,
                color=JOB if is_done else "white", edgecolor=JOB, zorder=2, label=label,
            )  # fmt: skip
    if means:
        across, up, spreads = zip(*means, strict=True)
        axes.errorbar(
            across, up, yerr=[spread or 0.0 for spread in spreads], fmt="_", color="#20262d", markersize=9,
            elinewidth=1.1, capsize=3, zorder=3, label="mean ± sd over seeds",
        )  # fmt: skip
    if objective.ranks(rows):
        _star(axes, *(means[0][:2] if means else (at[good[0].number], _value(good[0]))), 200)
    failed = [at[row.number] for row in rows if _is_lost(row)]
    if failed:
        bottom = axes.get_xaxis_transform()
        axes.scatter(
            failed, [0.025] * len(failed), transform=bottom, marker="x", s=34, color=FAILED, linewidth=1.6, zorder=3,
            clip_on=False, label="failed",
        )  # fmt: skip
    axes.margins(y=0.14)
    if _log_values(good, objective):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_format_number)
    axes.set_xlabel(short_text(scale.name, 40))
    _mark(axes, scale)
    axes.tick_params(which="both", length=0)


def _mark(axes: Axes, scale: Scale) -> None:
    numbers = sorted(set(scale.numbers.values()))
    if not numbers:
        _mark_texts(axes, scale)
        return
    is_log = needs_logarithm(numbers)
    places = [math.log(number) for number in numbers] if is_log else numbers
    margin = 0.08 * (places[-1] - places[0]) or 0.5
    if is_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_format_number)
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


def _star(axes: Axes, x: float, y: float, size: int) -> None:
    axes.scatter(x, y, marker="*", s=size, color=BEST, edgecolor="#5a3f00", linewidth=0.8, zorder=4, label="the best")


def _good(rows: Sequence[JobRow], objective: SweepObjective) -> list[JobRow]:
    return [row for row in best_first(rows, objective) if _has_value(row)]


def _has_value(row: JobRow) -> bool:
    return row.state != JobState.failed and row.objective is not None and abs(row.objective) < HUGE


def _is_drawn(config: SeedSummary) -> bool:
    return config.mean is not None and abs(config.mean) < HUGE and (config.sd or 0.0) < HUGE


def _is_lost(row: JobRow) -> bool:
    return row.state == JobState.failed or (row.state == JobState.done and not _has_value(row))


def _value(row: JobRow) -> float:
    assert row.objective is not None
    return row.objective if abs(row.objective) > 1 / HUGE else 0.0


def _log_values(rows: Sequence[JobRow], objective: SweepObjective) -> bool:
    """On a linear axis, a very high loss would flatten the others."""
    return objective.maximize is False and needs_logarithm([_value(row) for row in rows if _has_value(row)])


def _format_number(value: float, _: Any = None) -> str:
    return f"{value:g}"


@dataclass(frozen=True)
class Scale:
    """Places the values of one key on an axis: numbers by value, texts side by side.

    Args:
        name: the key.
        values: by job number; None if a job has none.
    """

    name: str
    values: dict[int, str | None]

    @property
    def numbers(self) -> dict[int, float]:
        numbers = {job: _number(value) for job, value in self.values.items()}
        found = {job: number for job, number in numbers.items() if number is not None}
        return found if len(found) == len(numbers) else {}

    @property
    def categories(self) -> list[str | None]:
        numbers = self.numbers
        jobs = sorted(self.values, key=lambda job: numbers.get(job, 0.0))
        return list(dict.fromkeys(self.values[job] for job in jobs))

    @property
    def positions(self) -> dict[int, float]:
        places = {value: float(place) for place, value in enumerate(self.categories)}
        return self.numbers or {job: places[value] for job, value in self.values.items()}

    @property
    def labels(self) -> list[str]:
        return ["none" if value is None else short_text(value) for value in self.categories]


def needs_logarithm(numbers: Sequence[float]) -> bool:
    return min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_FROM


def short_text(text: str, most: int = _MAX_LABEL) -> str:
    text = " ".join(printable(text).split()) or "''"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _number(value: str | None) -> float | None:
    number = comparable(value)
    return number if isinstance(number, float) and (number == 0 or 1 / HUGE < abs(number) < HUGE) else None
