"""Writes texts for a terminal: ranks' texts and errors made safe, numbers with their nouns, and durations."""

from __future__ import annotations

import math
import re
import traceback

MESSAGE_CHARS = 4_000
TRACE_CHARS = 32_000
"""Longest message and traceback of an error."""

_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # operating system commands: titles, links, the clipboard
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"  # colors, cursor moves
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Drop escape sequences and control characters, except tabs and newlines."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def shorten(text: str, most: int) -> str:
    """Keep the head and the tail of a text that is too long, and say how much is left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are left out here …\n{text[-half:]}"


def message_of(error: object) -> str:
    """Return the message of an error, also if its `__str__` fails."""
    try:
        return shorten(str(error), MESSAGE_CHARS)
    except Exception as failed:
        return f"(its message is not available: {type(error).__name__}.__str__ raised {type(failed).__name__})"


def traceback_of(error: BaseException) -> str:
    return shorten("".join(traceback.format_exception(error)), TRACE_CHARS)


def counted(number: float, noun: str) -> str:
    """Return for example "1 thread" or "1,442 samples"."""
    if round(number) == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number:,.0f} {noun[:-1]}ies"
    return f"{number:,.0f} {noun}{'es' if noun.endswith(('tch', 'nch', 'ss')) else 's'}"


def duration(seconds: float | None) -> str:
    """Return for example "12.3 s", "4:05 min" or "3:04:05 h"; "" where it is unknown or no length of time."""
    if seconds is None or not 0 <= seconds < math.inf:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"
