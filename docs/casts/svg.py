"""Draws a recorded terminal as an SVG that moves by itself, without a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT = 14
"""Height of a character, in pixels."""
LINE, WIDTH, EDGE = 18, 8.43, 14
"""Height of a row, width of a character, and the edge around the text, in pixels."""
BACKGROUND, TEXT = "#16181d", "#d7dae0"
COLOURS = {
    "black": "#3b4048", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef",
    "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d7dae0", "brightblack": "#7f848e", "brightred": "#ff7b86",
    "brightgreen": "#b5e890", "brightbrown": "#ffd98c", "brightblue": "#82c8ff", "brightmagenta": "#e39bff",
    "brightcyan": "#7fe0ec", "brightwhite": "#ffffff",
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Hold neighbouring characters of one look.

    Args:
        column: of the first one.
        text: the characters.
        colour: a name of `COLOURS`, six hexadecimal digits, or "default".
        bold: whether they are bold.
    """

    column: int
    text: str
    colour: str
    bold: bool


Row = tuple[Span, ...]


@dataclass(frozen=True)
class Frame:
    """Hold what a terminal shows from some moment on.

    Args:
        at_s: the moment, in seconds from the beginning.
        rows: from top to bottom.
    """

    at_s: float
    rows: tuple[Row, ...]


def draw(frames: Sequence[Frame], columns: int, lines: int, hold_s: float, title: str) -> str:
    """Return the SVG; it begins again after its last frame.

    Args:
        frames: at least one, in order of time.
        columns: of the terminal.
        lines: of the terminal.
        hold_s: how long the last frame stays.
        title: what it shows, for readers that can't see it.
    """
    width, height = round(columns * WIDTH + 2 * EDGE), lines * LINE + 2 * EDGE
    total_s = frames[-1].at_s + hold_s
    names: dict[Row, str] = {}
    shown = []
    for number, frame in enumerate(frames):
        used = []
        for line, row in enumerate(frame.rows):
            if row:
                name = names.setdefault(row, f"r{len(names)}")
                used.append(f'<use href="#{name}" y="{line * LINE}"/>')
        shown.append(f'<g transform="translate({number * width} 0)">{"".join(used)}</g>')
    steps = [
        f"{100 * frame.at_s / total_s:.3f}%{{transform:translateX(-{n * width}px)}}" for n, frame in enumerate(frames)
    ]
    last = (len(frames) - 1) * width
    style = (
        f"text{{font:{FONT}px ui-monospace,Menlo,Consolas,monospace;fill:{TEXT};white-space:pre}}"
        f"#film{{animation:film {total_s:.2f}s step-end infinite}}@keyframes film{{{''.join(steps)}}}"
        f"@media(prefers-reduced-motion){{#film{{animation:none;transform:translateX(-{last}px)}}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n"
        f"<defs>\n{''.join(map(definition, names.items()))}</defs>\n"
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>\n'
        f'<svg x="{EDGE}" y="{EDGE}" width="{width - 2 * EDGE}" height="{height - 2 * EDGE}"><g id="film">\n'
        + "\n".join(shown)
        + "\n</g></svg>\n</svg>\n"
    )


def definition(named: tuple[Row, str]) -> str:
    """Return the definition of a row."""
    row, name = named
    spans = "".join(f'<tspan x="{span.column * WIDTH:.1f}"{look(span)}>{escape(span.text)}</tspan>' for span in row)
    return f'<text id="{name}" y="{FONT}">{spans}</text>\n'


def look(span: Span) -> str:
    """Return the attributes of a span."""
    colour = "" if span.colour == "default" else COLOURS.get(span.colour, f"#{span.colour}")
    return (f' fill="{colour}"' if colour else "") + (' font-weight="bold"' if span.bold else "")
