"""Refuses values of the config that are out of their range."""

from __future__ import annotations

import math


def check_range(
    name: str, value: float, low: float, high: float = math.inf, *, example: float, above: bool = False
) -> None:
    """Refuse a value that is out of its range.

    Args:
        name: of the key below `data`.
        value: what was given.
        low: the smallest value.
        high: the largest value.
        example: a value to type.
        above: the value must be above `low`.

    Raises:
        ValueError: it is out of its range.
    """
    if not low <= value <= high or (above and value == low):
        span = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        raise ValueError(f"{name} is {value}, and must be {span}: type data.{name}={example}")
