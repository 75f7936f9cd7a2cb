"""Decide who goes on, who copies whom, and with which values: one generation from the one before."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_hydra.sweep.pbt.space import Dimension


@dataclass(frozen=True)
class Member:
    """Hold one member of a generation.

    Args:
        values: of the keys that are searched, as typed.
        parent: the place in the generation before of the member whose checkpoint it resumes; None in the first one.
    """

    values: Mapping[str, str]
    parent: int | None = None

    def copies(self, place: int) -> bool:
        """Return whether it goes on from another member than the one at its own place."""
        return self.parent not in (None, place)


@dataclass(frozen=True)
class Rules:
    """State how a generation comes from the one before.

    Args:
        quantile: the share of members that is replaced by copies of the best ones.
        resample_probability: how often the value of a copy is drawn anew, instead of changed.
        factors: numbers are multiplied by one of these.
        seed: of all that is drawn.
    """

    quantile: float = 0.2
    resample_probability: float = 0.25
    factors: tuple[float, ...] = (0.8, 1.2)
    seed: int = 0


def first_generation(size: int, space: Mapping[str, Dimension], rules: Rules) -> list[Member]:
    """Return the members of the first generation, with values drawn from all.

    Args:
        size: number of members.
        space: the keys to search.
        rules: their seed is used.
    """
    rng = random.Random(f"{rules.seed}/0")  # noqa: S311, a search and no secret
    return [Member({key: dimension.draw(rng) for key, dimension in space.items()}) for _ in range(size)]


def next_generation(
    number: int,
    members: Sequence[Member],
    scores: Sequence[float | None],
    maximize: bool,
    space: Mapping[str, Dimension],
    rules: Rules,
) -> list[Member]:
    """Return the members of the next generation.

    The worst go on from a checkpoint of one of the best, with changed values (truncation selection); so do those that
    have failed. The others go on as they are. What is drawn depends on the seed, the number and the scores only.

    Args:
        number: of the next generation.
        members: of the last one.
        scores: of its members; None for one that failed.
        maximize: whether higher is better.
        space: the keys to search.
        rules: see `Rules`.

    Raises:
        ValueError: all have failed.
    """
    rng = random.Random(f"{rules.seed}/{number}")  # noqa: S311
    ranking = ranked(scores, maximize)
    alive = [place for place in ranking if _is_good(scores[place])]
    if not alive:
        raise ValueError("no member is left")
    n = min(math.ceil(rules.quantile * len(members)), len(members) // 2)
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
            key: _explored(dimension, members[parent].values[key], rng, rules) for key, dimension in space.items()
        }
        found.append(Member(values, parent))
    return found


def ranked(scores: Sequence[float | None], maximize: bool) -> list[int]:
    """Return the places of members from the best to the worst; those without a score come last."""

    def key(place: int) -> tuple[bool, float, int]:
        score = scores[place]
        if score is None or not math.isfinite(score):
            return True, 0.0, place
        return False, -score if maximize else score, place

    return sorted(range(len(scores)), key=key)


def _is_good(score: float | None) -> bool:
    return score is not None and math.isfinite(score)


def _explored(dimension: Dimension, value: str, rng: random.Random, rules: Rules) -> str:
    if rng.random() < rules.resample_probability:
        return dimension.draw(rng)
    return dimension.change(value, rng, rules.factors)
