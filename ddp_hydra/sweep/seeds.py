"""Sums up the jobs of a sweep that differ in their seed only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hydra.sweep.rows import Objective, Row, State, data_of, sort_key, swept


@dataclass(frozen=True)
class Repeated:
    """The objective of one config over its seeds.

    Args:
        values: the swept keys and values of the config, without the seed.
        jobs: the numbers of its jobs.
        n: how many of them count: they are done and have a finite objective.
        mean: of these; None if there are none.
        sd: their sample standard deviation; None for fewer than two.
        best: the best of these; None if there are none, or it is not known what is better.
        worst: the worst, in the same way.
    """

    values: dict[str, str]
    jobs: list[int]
    n: int
    mean: float | None
    sd: float | None
    best: float | None
    worst: float | None


def is_seed(key: str) -> bool:
    """Return whether a key is that of a seed."""
    return key == "seed" or key.endswith(".seed")


def repeated(rows: Sequence[Row], objective: Objective) -> list[Repeated]:
    """Return one entry for each config, the one with the best mean first.

    Configs with other data are grouped, because their values cannot be compared.

    Args:
        rows: of a sweep.
        objective: if it has no direction, configs stay in the order of their jobs.

    Returns:
        [] if no config is repeated with another seed.
    """
    values = swept(rows)
    if not any(is_seed(key) for given in values.values() for key in given):
        return []
    configs: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        given = tuple((key, value) for key, value in values[row.number].items() if not is_seed(key))
        configs.setdefault(given, []).append(row)
    if all(len(same) < 2 for same in configs.values()):
        return []
    data = data_of(rows)
    places = {value: place for place, value in enumerate(dict.fromkeys(data.values()))}
    found = [(places[data[same[0].number]], _summed(dict(given), same, objective)) for given, same in configs.items()]
    if objective.maximize is not None:
        found.sort(key=lambda pair: (pair[0], *sort_key(pair[1].mean, objective.maximize)))
    return [entry for _, entry in found]


def _summed(values: dict[str, str], rows: Sequence[Row], objective: Objective) -> Repeated:
    counted = [
        row.objective
        for row in rows
        if row.state == State.done and row.objective is not None and math.isfinite(row.objective)
    ]
    ordered = sorted(counted, reverse=bool(objective.maximize))
    is_known = bool(ordered) and objective.maximize is not None
    return Repeated(
        values=values,
        jobs=[row.number for row in rows],
        n=len(counted),
        mean=statistics.fmean(counted) if counted else None,
        sd=statistics.stdev(counted) if len(counted) > 1 else None,
        best=ordered[0] if is_known else None,
        worst=ordered[-1] if is_known else None,
    )
