"""The members of a population: the values that they may have, and which members are copied into the next generation."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.rows import sort_key

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


@dataclass
class PopulationSettings:
    """The options of the sweeper.

    Args:
        population: members of a generation.
        generations: how many there are; the last one trains to the end of the run.
        validations: number of validations after which a generation ends.
        quantile: the share of members that is replaced by copies of the best ones.
        resample_probability: how often the value of a copy is drawn anew, instead of changed.
        factors: numbers are multiplied by one of these.
        seed: of all that is drawn.

    Raises:
        ConfigError: a value is out of its range.
    """

    population: int = 8
    generations: int = 4
    validations: int = 1
    quantile: float = 0.2
    resample_probability: float = 0.25
    factors: Sequence[float] = (0.8, 1.2)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("population", 2), ("generations", 1), ("validations", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self._refused(name, f"a whole number of at least {least}")
        if not _is_share(self.quantile) or self.quantile > 0.5:
            raise self._refused("quantile", "a share from 0 to 0.5")
        if not _is_share(self.resample_probability):
            raise self._refused("resample_probability", "a share from 0 to 1")
        self.factors = list(self.factors)
        if not self.factors or not all(isinstance(one, int | float) and one > 0 for one in self.factors):
            raise self._refused("factors", "numbers above 0, [0.8,1.2]")
        if not isinstance(self.seed, int):
            raise self._refused("seed", "a whole number")

    def _refused(self, name: str, allowed: str) -> ConfigError:
        return ConfigError(f"hydra.sweeper.{name}={getattr(self, name)}: give {allowed}")

    def pause_after(self, generation: int) -> int | None:
        """Return the number of validations after which a generation pauses; None for the last one."""
        return None if generation == self.generations - 1 else self.validations * (generation + 1)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


@dataclass(frozen=True)
class Member:
    """A member of a generation.

    Args:
        values: of the keys that are searched, as typed.
        parent: the place in the generation before of the member whose checkpoint it resumes; None in the first one.
    """

    values: Mapping[str, str]
    parent: int | None = None


def first_generation(space: Mapping[str, Dimension], settings: PopulationSettings) -> list[Member]:
    rng = random.Random(f"{settings.seed}/0")  # noqa: S311, a search and no secret
    members = range(settings.population)
    return [Member({key: dimension.draw(rng) for key, dimension in space.items()}) for _ in members]


def next_generation(
    number: int,
    members: Sequence[Member],
    scores: Sequence[float | None],
    maximize: bool,
    space: Mapping[str, Dimension],
    settings: PopulationSettings,
) -> list[Member]:
    """Return the next generation; scores are None for members that have failed. Raise ValueError if all have.

    The worst go on from a checkpoint of one of the best, with changed values (truncation selection); so do those that
    have failed. The others go on as they are. What is drawn depends on the seed, the number and the scores only.
    """
    rng = random.Random(f"{settings.seed}/{number}")  # noqa: S311
    ranking = ranked(scores, maximize)
    alive = [place for place in ranking if _is_good(scores[place])]
    if not alive:
        raise ValueError("no member is left")
    n = min(math.ceil(settings.quantile * len(members)), len(members) // 2)
    best = [place for place in ranking[: max(1, n)] if _is_good(scores[place])]
    replaced = {place for place in (ranking[-n:] if n else []) if place not in best}
    replaced |= {place for place in ranking if not _is_good(scores[place])}
    found = []
    for place, member in enumerate(members):
        if place not in replaced:
            found.append(Member(member.values, place))
            continue
        parent = rng.choice(best)
        values = {
            key: _explored(dimension, members[parent].values[key], rng, settings) for key, dimension in space.items()
        }
        found.append(Member(values, parent))
    return found


def ranked(scores: Sequence[float | None], maximize: bool) -> list[int]:
    good = [score if _is_good(score) else None for score in scores]
    return sorted(range(len(scores)), key=lambda place: sort_key(good[place], maximize))


def _is_good(score: float | None) -> bool:
    return score is not None and math.isfinite(score)


def _explored(dimension: Dimension, value: str, rng: random.Random, settings: PopulationSettings) -> str:
    if rng.random() < settings.resample_probability:
        return dimension.draw(rng)
    return dimension.change(value, rng, settings.factors)
