"""Population-based training (Jaderberg et al., 2017), `hydra/sweeper=pbt`: repeatable from its seed.

Every Hydra app imports it, so it imports little.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from msgspec import Meta
from omegaconf import DictConfig

from ddp_hydra.config.limits import AtLeast1, AtLeast2, check_known, check_limits, limits_of
from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError, SweepFailed
from ddp_hydra.storage.manifest import FOLDER, LAST
from ddp_hydra.sweep.rows import score
from ddp_hydra.sweep.search_space import PBT, check_override

log = logging.getLogger(__name__)
PAUSE = "trainer.pause_after_validations"
DIGITS = 6
"""Significant digits of drawn numbers, so that they look like typed ones."""


@dataclass(frozen=True)
class Interval:
    """All numbers from one to another: `interval(1e-4, 1e-1)`.

    Args:
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
        text = str(round(number)) if self.is_int else f"{number:.{DIGITS}g}"
        return text if self.low <= float(text) <= self.high else repr(number)


@dataclass(frozen=True)
class Choice:
    """Some values: `choice(32, 64, 128)`, `range(1, 5)` or `32,64,128`."""

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
    check_override(override, PBT)
    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        is_int = isinstance(value.start, int) and isinstance(value.end, int)
        return Interval(float(value.start), float(value.end), "log" in value.tags, is_int)
    values = tuple(dict.fromkeys(override.sweep_string_iterator()))
    if len(values) < 2:
        raise ConfigError(f"{override.input_line}: give two values or more")
    return Choice(values)


Factor = Annotated[float, Meta(gt=0)]


@dataclass
class PopulationSettings:
    """The options of the sweeper.

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
    """Return the next generation; scores are None for members without a finite one. Raise ValueError if all are.

    The worst go on from a checkpoint of one of the best, with changed values (truncation selection); so do those that
    have failed. The others go on as they are. What is drawn depends on the seed, the number and the scores only.
    """
    rng = random.Random(f"{settings.seed}/{number}")  # noqa: S311
    ranking = ranked(scores, maximize)
    alive = [place for place in ranking if scores[place] is not None]
    if not alive:
        raise ValueError("no member is left")
    n = min(math.ceil(settings.quantile * len(members)), len(members) // 2)
    best = alive[: max(1, n)]
    replaced = set(ranking[len(ranking) - n :]) - set(best) | set(ranking) - set(alive)
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
    return sorted(range(len(scores)), key=lambda place: -score(scores[place], maximize))


class PopulationSweeper(Sweeper):
    """Trains a population in generations: each is one batch of jobs, which go on from checkpoints of the one before.

    Args:
        params: the keys to search, in Hydra's syntax for sweeps.
        options: see `PopulationSettings`.

    Attributes:
        scores: objectives of the members of the last generation, by their place; None for one that has failed.
        folders: their run directories.
    """

    def __init__(self, params: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.params, self.options = params, options
        self.scores: list[float | None] = []
        self.folders: list[str] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from ddp_hydra.sweep.planned_job import is_ours
        from ddp_hydra.sweep.settings import objective_of

        if not is_ours(config):
            raise ConfigError("hydra/sweeper=pbt resumes jobs from checkpoints, so it is for ddp_hydra's configs only")
        self.hydra_context: HydraContext = hydra_context
        self.config: DictConfig = config
        check_known("hydra.sweeper", self.options, ["params", *PopulationSettings.__annotations__])
        self.settings = PopulationSettings(**self.options)
        self.objective = objective_of(config)
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        fixed, space = self.read(arguments)
        folder = Path(str(self.config.hydra.sweep.dir)).absolute()
        members, maximize = first_generation(space, self.settings), bool(self.objective.maximize)
        returns: list[Sequence[JobReturn]] = []
        for generation in range(self.settings.generations):
            if generation:
                try:
                    members = next_generation(generation, members, self.scores, maximize, space, self.settings)
                except ValueError as error:
                    raise SweepFailed(f"generation {generation - 1}: {error}; see {folder}/sweep.md") from None
            returns.append(self.train(generation, members, fixed))
        shown, best = os.path.relpath(folder), ranked(self.scores, maximize)[0]
        if (value := self.scores[best]) is None:
            raise SweepFailed(f"all members of the last generation have failed: see {shown}/sweep.md")
        checkpoint = Path(os.path.relpath(self.folders[best]), FOLDER, LAST)
        log.info("best: member %d with %s %.5g  ->  %s", best, self.objective.metric, value, checkpoint)
        results = [result for batch in returns for result in batch]
        if failed := [result for result in results if result.status == JobStatus.FAILED]:
            raise SweepFailed(f"{len(failed)} of {len(results)} jobs have failed: see {shown}/sweep.md")
        return returns

    def read(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Dimension]]:
        words = [*(f"{key}={value}" for key, value in (self.params or {}).items()), *arguments]
        fixed, searched = parse(words, self.hydra_context.config_loader)
        if not searched:
            raise ConfigError(
                "hydra/sweeper=pbt has no keys to search: give optimizer.lr='tag(log, interval(1e-4, 1e-1))'"
            )
        if own := [key for key in (*searched, *(word.partition("=")[0] for word in fixed)) if key.strip("+") == PAUSE]:
            raise ConfigError(f"{own[0]} is set by hydra/sweeper=pbt: give hydra.sweeper.validations instead")
        return fixed, searched

    def train(self, generation: int, members: Sequence[Member], fixed: Sequence[str]) -> Sequence[JobReturn]:
        pause = self.settings.pause_after(generation)
        batch = []
        for member in members:
            own = [f"{key}={value}" for key, value in member.values.items()]
            own += [f"{PAUSE}={pause}"] if pause is not None else []
            others = list(fixed)
            if member.parent is not None:
                others = [word for word in fixed if not word.startswith("resume=")]
                own.append(f"resume={text.quoted(os.path.relpath(self.folders[member.parent]))}")
            batch.append([*others, *own])
        self.launcher.labels = [  # type: ignore[attr-defined]  # for the tables of our launcher
            {
                "generation": str(generation),
                "member": str(place),
                "parent": "" if member.parent is None else str(member.parent),
            }
            for place, member in enumerate(members)
        ]
        self.validate_batch_is_legal(batch)
        results = self.launcher.launch(batch, initial_job_idx=generation * len(members))
        self.scores, self.folders = list(map(score_of, results)), list(map(folder_of, results))
        return results


def score_of(result: JobReturn) -> float | None:
    value = result._return_value if result.status == JobStatus.COMPLETED else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def folder_of(result: JobReturn) -> str:
    if result.hydra_cfg is not None:
        return str(result.hydra_cfg.hydra.runtime.output_dir)
    return str(result.working_dir)  # of a job that ended in an earlier run of the sweep
