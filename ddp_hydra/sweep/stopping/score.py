"""Compare values of an objective."""

from __future__ import annotations

import math


def score(value: float, maximize: bool) -> float:
    """Return a number that is higher for a better value; NaN is the worst."""
    if math.isnan(value):
        return -math.inf
    return value if maximize else -value
