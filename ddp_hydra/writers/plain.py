"""Text of ranks, made harmless for a terminal."""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # operating system commands: titles, links, the clipboard
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"  # colors, cursor moves
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str) -> str:
    """Drop escape sequences and control characters, except tabs and newlines."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))
