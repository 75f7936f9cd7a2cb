"""Place the values of a swept key on an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hydra.console.text import plain

HUGE = 1e30
"""Larger numbers, and numbers closer to 0 than its inverse, break matplotlib's axes."""
_LOG_FROM = 100
_MAX_LABEL = 18


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
        return ["none" if value is None else shown(value) for value in self.categories]


def spans(numbers: Sequence[float]) -> bool:
    """Return whether numbers are better placed by their logarithms."""
    return min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_FROM


def shown(text: str, most: int = _MAX_LABEL) -> str:
    """Return a text as one line of at most so many letters."""
    text = " ".join(plain(text).split()) or "''"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if number == 0 or 1 / HUGE < abs(number) < HUGE else None
