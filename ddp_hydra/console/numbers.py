"""Write numbers with their nouns, and durations."""

from __future__ import annotations

import math


def counted(number: float, noun: str) -> str:
    """Return for example "1 thread" or "1,442 samples".

    Args:
        number: any number.
        noun: the noun in the singular.
    """
    if round(number) == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,.0f} {plural}"


def duration(seconds: float | None) -> str:
    """Return for example "12.3 s", "4:05 min" or "3:04:05 h"; "" where it is unknown or no length of time."""
    if seconds is None or not 0 <= seconds < math.inf:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"
