"""Draws axes and writes picture files for a sweep; the same content gives the same files."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hydra.console.text import plain
from ddp_hydra.storage.files import write_atomic
from ddp_hydra.sweep.forked_process import ForkedProcess, wait_for_message
from ddp_hydra.sweep.rows import comparable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)
JOB, BEST, FAILED, GREY = "#2f6db3", "#f2a900", "#c8372d", "#5c6570"
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"], "font.size": 9, "axes.edgecolor": "#b8bec6", "axes.labelcolor": "#20262d",
    "axes.spines.right": False, "axes.spines.top": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e8ebee", "xtick.color": GREY, "ytick.color": GREY, "text.color": "#20262d",
    "text.parse_math": False, "figure.facecolor": "white", "svg.hashsalt": "ddp_hydra",
}  # fmt: skip
DRAW_S = 30.0
"""How long a picture may take."""
HUGE = 1e30
"""Larger numbers, and numbers closer to 0 than its inverse, break matplotlib's axes."""
_LOG_FROM = 100
_MAX_LABEL = 18


def draw(figure: Callable[[], Figure], folder: Path, name: str) -> bool:
    """Draw a figure into <name>.png and <name>.svg; return whether that was possible.

    An error, such as that matplotlib is missing, is logged, and ends no sweep.

    Args:
        figure: makes it.
        folder: of the files.
        name: of the files, and of what they show.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about letters that the font lacks
            from matplotlib import rc_context

            with rc_context(STYLE):
                for kind, content in _encoded(figure()).items():
                    write_atomic(folder / f"{name}.{kind}", content)
    except ImportError:
        log.warning("there is no picture of the %s without matplotlib: pip install 'ddp-hydra[plot]'", name)
        return False
    except Exception as error:  # an error of matplotlib
        log.warning("there is no picture of the %s: %s", name, error)
        return False
    return True


def _encoded(figure: Figure) -> dict[str, bytes]:
    """Return the content of the image files of a figure, by the ends of their names. They are drawn side by side."""
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine(None)  # else each file would be drawn twice, the first time to find all places
    other = ForkedProcess(lambda pipe: _svg(figure))
    try:
        png = io.BytesIO()
        figure.savefig(png, format="png")
        wait_for_message([other], DRAW_S)
        other.receive()
        (svg,) = other.messages or ["it took too long"]
    finally:
        other.end()
    if isinstance(svg, str):
        raise RuntimeError(svg)
    return {"png": png.getvalue(), "svg": svg}


def _svg(figure: Figure) -> bytes | str:
    """Return a figure as SVG, or why matplotlib could not draw it."""
    svg = io.BytesIO()
    try:
        figure.savefig(svg, format="svg", metadata={"Date": None})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return svg.getvalue()


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
        return ["none" if value is None else shown(value) for value in self.categories]


def spans(numbers: Sequence[float]) -> bool:
    """Return whether numbers are better placed by their logarithms."""
    return min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_FROM


def shown(text: str, most: int = _MAX_LABEL) -> str:
    """Return a text as one line of at most so many letters."""
    text = " ".join(plain(text).split()) or "''"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _number(value: str | None) -> float | None:
    number = comparable(value)
    return number if isinstance(number, float) and (number == 0 or 1 / HUGE < abs(number) < HUGE) else None
