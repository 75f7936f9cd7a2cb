"""The values of the keys that population-based training searches: how they are drawn and changed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException

from ddp_hydra.errors import ConfigError

DIGITS = 6
"""Significant digits of drawn numbers, so that they look like typed ones."""


@dataclass(frozen=True)
class Interval:
    """All numbers from one to another: `interval(1e-4, 1e-1)`.

    Args:
        low: the smallest.
        high: the largest.
        is_log: draw them by their logarithm: `tag(log, interval(…))`.
        is_int: whole numbers only: `int(interval(…))`.
    """

    low: float
    high: float
    is_log: bool = False
    is_int: bool = False

    def draw(self, rng: random.Random) -> str:
        if self.is_log:
            return self._text(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return self._text(rng.uniform(self.low, self.high))

    def change(self, value: str, rng: random.Random, factors: Sequence[float]) -> str:
        """Return the number multiplied by one of the factors, but not beyond the ends.

        A whole number changes by 1 or more, and 0 by 1, or by a hundredth of the interval, up or down as the factor.
        """
        before, factor = float(value), rng.choice(factors)
        changed = before * factor
        if before == 0 and factor != 1:
            step = 1.0 if self.is_int else (self.high - self.low) / 100
            changed = step if factor > 1 else -step
        elif self.is_int and round(changed) == round(before) and changed != before:
            changed = before + (1 if changed > before else -1)
        return self._text(changed)

    def _text(self, number: float) -> str:
        number = min(max(number, self.low), self.high)
        return str(round(number)) if self.is_int else f"{number:.{DIGITS}g}"


@dataclass(frozen=True)
class Choice:
    """Some values: `choice(32, 64, 128)`, `range(1, 5)` or `32,64,128`.

    Args:
        values: in an order in which neighbours are alike.
    """

    values: tuple[str, ...]

    def draw(self, rng: random.Random) -> str:
        return rng.choice(self.values)

    def change(self, value: str, rng: random.Random, factors: Sequence[float]) -> str:
        at = self.values.index(value) + rng.choice((-1, 1))
        return self.values[min(max(at, 0), len(self.values) - 1)]


Dimension = Interval | Choice
"""The values of one key, as a user would type them."""


def parse(words: Sequence[str], config_loader: Any = None) -> tuple[list[str], dict[str, Dimension]]:
    """Return the overrides that all jobs have, and the keys to search. Of two words for a key, the later one counts."""
    fixed: dict[str, str] = {}
    searched: dict[str, Dimension] = {}
    for override in OverridesParser.create(config_loader=config_loader).parse_overrides(list(words)):
        key = override.get_key_element()
        fixed.pop(key, None)
        searched.pop(key, None)
        if override.is_sweep_override():
            searched[key] = _dimension(override)
        else:
            fixed[key] = str(override.input_line)
    return list(fixed.values()), searched


def _dimension(override: Override) -> Dimension:
    value, line = override.value(), override.input_line
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        low, high = float(value.start), float(value.end)
        is_int = isinstance(value.start, int) and isinstance(value.end, int)
        is_log = "log" in value.tags
        if not low < high or (is_log and low <= 0):
            raise ConfigError(f"{line}: an interval goes from a number to a larger one, and with log from more than 0")
        return Interval(low, high, is_log, is_int)
    if isinstance(value, Glob):
        raise ConfigError(f"{line}: give the names one by one, choice(a,b)")
    try:
        values = tuple(dict.fromkeys(override.sweep_string_iterator()))
    except (HydraException, ValueError, TypeError) as error:
        raise ConfigError(f"{line}: {error}") from None
    if len(values) < 2:
        raise ConfigError(f"{line}: give two values or more")
    return Choice(values)
