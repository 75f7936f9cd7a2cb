"""The members of a population: their settings, and which members are copied into the next generation."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from ddp_hydra.config.schema import AtLeast1, AtLeast2, check_limits, limits_of
from ddp_hydra.sweep.pbt.space import Dimension
from ddp_hydra.sweep.rows import sort_key

Factor = Annotated[float, Meta(gt=0)]


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

    population: AtLeast2 = 8
    generations: AtLeast1 = 4
    validations: AtLeast1 = 1
    quantile: Annotated[float, Meta(ge=0, le=0.5, description="a share from 0 to 0.5")] = 0.2
    resample_probability: Annotated[float, Meta(ge=0, le=1, description="a share from 0 to 1")] = 0.25
    factors: Annotated[list[Factor], Meta(min_length=1, description="numbers above 0, [0.8,1.2]")] = field(
        default_factory=lambda: [0.8, 1.2]
    )
    seed: Annotated[int, Meta(description="a whole number")] = 0

    def __post_init__(self) -> None:
        self.factors = list(self.factors)
        check_limits("hydra.sweeper.", vars(self), limits_of(PopulationSettings))

    def pause_after(self, generation: int) -> int | None:
        """Return the number of validations after which a generation pauses; None for the last one."""
        return None if generation == self.generations - 1 else self.validations * (generation + 1)


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
        values = {}
        for key, dimension in space.items():
            is_new, value = rng.random() < settings.resample_probability, members[parent].values[key]
            values[key] = dimension.draw(rng) if is_new else dimension.change(value, rng, settings.factors)
        found.append(Member(values, parent))
    return found


def ranked(scores: Sequence[float | None], maximize: bool) -> list[int]:
    good = [score if _is_good(score) else None for score in scores]
    return sorted(range(len(scores)), key=lambda place: sort_key(good[place], maximize))


def _is_good(score: float | None) -> bool:
    return score is not None and math.isfinite(score)
