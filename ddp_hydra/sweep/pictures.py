"""The look of the pictures of a sweep, and their files, which are the same for the same content."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass
class Drawing:
    """Tell whether a picture was drawn.

    Args:
        is_done: whether the block has come to its end.
    """

    is_done: bool = False


@contextmanager
def undisturbed(what: str) -> Iterator[Drawing]:
    """Draw inside the block: an error there, such as that matplotlib is missing, is logged, and ends no sweep.

    Args:
        what: the subject of the picture.
    """
    state = Drawing()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about letters that the font lacks
            yield state
        state.is_done = True
    except ImportError:
        log.warning("there is no picture of the %s without matplotlib: pip install 'ddp-hydra[plot]'", what)
    except Exception as error:  # an error of matplotlib
        log.warning("there is no picture of the %s: %s", what, error)


def encoded(figure: Figure) -> dict[str, bytes]:
    """Return the content of the image files of a figure, by the ends of their names; call it with `STYLE`."""
    png, svg = io.BytesIO(), io.BytesIO()
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine(None)  # else each file would be drawn twice, the first time to find all places
    figure.savefig(png, format="png")
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return {"png": png.getvalue(), "svg": svg.getvalue()}
