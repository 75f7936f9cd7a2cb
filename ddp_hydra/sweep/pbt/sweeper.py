"""The sweeper that Hydra calls for population-based training. Every Hydra app imports it, so it imports little."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ddp_hydra.errors import ConfigError, SweepFailed

if TYPE_CHECKING:
    from ddp_hydra.sweep.pbt.population import Member
    from ddp_hydra.sweep.pbt.space import Dimension

log = logging.getLogger(__name__)
PAUSE = "trainer.pause_after_validations"


class PopulationSweeper(Sweeper):
    """Trains a population in generations: each is one batch of jobs, which go on from checkpoints of the one before.

    Args:
        direction: maximize or minimize; None for the direction of the objective.
        params: the keys to search, in Hydra's syntax for sweeps.
        options: see `population.PopulationSettings`.

    Attributes:
        scores: objectives of the members of the last generation, by their place; None for one that has failed.
        folders: their run directories.
    """

    def __init__(self, params: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.params, self.options = params, options
        self.scores: list[float | None] = []
        self.folders: list[str] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from ddp_hydra.sweep.pbt.population import PopulationSettings
        from ddp_hydra.sweep.planned_job import is_ours
        from ddp_hydra.sweep.settings import objective_of

        if not is_ours(config):
            raise ConfigError("hydra/sweeper=pbt resumes jobs from checkpoints, so it is for ddp_hydra's configs only")
        self.hydra_context: HydraContext = hydra_context
        self.config: DictConfig = config
        self.settings = PopulationSettings(**self.options)
        self.objective = objective_of(config)
        if self.objective.maximize is None:
            raise ConfigError(
                "hydra/sweeper=pbt needs to know what is better: give objective.direction=maximize or minimize"
            )
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        from ddp_hydra.config import redact
        from ddp_hydra.sweep.pbt.population import first_generation, next_generation, ranked

        fixed, space = self.read(arguments)
        folder = Path(str(self.config.hydra.sweep.dir)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "multirun.yaml").write_text(redact.yaml_text(self.config), encoding="utf-8")
        members, maximize = first_generation(space, self.settings), bool(self.objective.maximize)
        returns: list[Sequence[JobReturn]] = []
        for generation in range(self.settings.generations):
            if generation:
                try:
                    members = next_generation(generation, members, self.scores, maximize, space, self.settings)
                except ValueError as error:
                    raise SweepFailed(f"generation {generation - 1}: {error}; see {folder}/sweep.md") from None
            returns.append(self.train(generation, members, fixed))
        best = ranked(self.scores, maximize)[0]
        if (score := self.scores[best]) is None:
            log.warning("all members of the last generation have failed: see %s/sweep.md", os.path.relpath(folder))
            return returns
        checkpoint = Path(os.path.relpath(self.folders[best]), "checkpoints", "last.pt")
        log.info("best: member %d with %s %.5g  ->  %s", best, self.objective.metric, score, checkpoint)
        return returns

    def read(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Dimension]]:
        from ddp_hydra.sweep.pbt import space

        words = [*(f"{key}={value}" for key, value in (self.params or {}).items()), *arguments]
        fixed, searched = space.parse(words, self.hydra_context.config_loader)
        if not searched:
            raise ConfigError(
                "hydra/sweeper=pbt has no keys to search: give optimizer.lr='tag(log, interval(1e-4, 1e-1))'"
            )
        if own := [key for key in (*searched, *(word.partition("=")[0] for word in fixed)) if key.strip("+") == PAUSE]:
            raise ConfigError(f"{own[0]} is set by hydra/sweeper=pbt: give hydra.sweeper.validations instead")
        if "resume" in searched:
            raise ConfigError("resume can't be searched: hydra/sweeper=pbt sets it itself")
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
                own.append(f"resume={quoted(os.path.relpath(self.folders[member.parent]))}")
            batch.append([*others, *own])
        if isinstance(getattr(self.launcher, "labels", None), list):  # our launcher shows them in its tables
            self.launcher.labels = [  # type: ignore[attr-defined]
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
    return float(value) if isinstance(value, int | float) else None


def folder_of(result: JobReturn) -> str:
    if result.hydra_cfg is not None:
        return str(result.hydra_cfg.hydra.runtime.output_dir)
    return str(result.working_dir)  # of a job that ended in an earlier run of the sweep


def quoted(path: str) -> str:
    return path if re.fullmatch(r"[\w./-]+", path) else QuotedString(path, Quote.single).with_quotes()
