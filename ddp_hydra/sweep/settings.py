"""The options of a sweep: `hydra.launcher`, and the metric that its jobs are compared by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config import objective
from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.planned_job import is_ours
from ddp_hydra.sweep.pruning import number_kept
from ddp_hydra.sweep.rows import Objective

DIRECTIONS = ("maximize", "minimize")


@dataclass(frozen=True)
class Settings:
    """The options of `hydra.launcher`.

    Args:
        max_jobs: how many jobs may run at once; None for as many as fit.
        fail_fast: stop the sweep at the first job that fails.
        retry_failed: when a sweep is resumed, run again the jobs that failed.
        job_timeout_s: a job that takes longer is stopped and counts as failed, in seconds; None for no limit.
        ranks: only for other apps: run the task on so many ranks; None for a plain process.
        cluster: only for other apps: `_target_` and arguments of the cluster; None for a local one.
        direction: only for other apps: maximize or minimize the return value; None for the sweeper's direction.
        keep: the jobs that keep their checkpoints: all, none or best:5, of those that have ended. Of a population, the
            last generation counts.
        stop: the rule that stops jobs early, see `stopping.settings`; None for none.
    """

    max_jobs: int | None = None
    fail_fast: bool = False
    retry_failed: bool = False
    job_timeout_s: float | None = None
    ranks: int | None = None
    cluster: Any = None
    direction: str | None = None
    keep: str | None = "all"
    stop: Any = None

    def __post_init__(self) -> None:
        for key in ("max_jobs", "ranks"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"hydra.launcher.{key}={value}: give a whole number of at least 1, or null")
        if self.cluster is not None and self.ranks is None:
            raise ConfigError("hydra.launcher.cluster is for tasks with ranks: give hydra.launcher.ranks=2, too")
        if self.direction not in (None, *DIRECTIONS):
            raise ConfigError(f"hydra.launcher.direction={self.direction}: give maximize or minimize, or null")
        limit_s = self.job_timeout_s
        if limit_s is not None and not (isinstance(limit_s, int | float) and limit_s > 0):
            raise ConfigError(f"hydra.launcher.job_timeout_s={limit_s}: give seconds, more than 0, or null")
        number_kept(self.keep)

    def check(self, is_ours: bool) -> None:
        """Refuse the options that are only for jobs with our configs, or only for other apps.

        Raises:
            ConfigError: the message says what to give instead.
        """
        if not is_ours:
            if number_kept(self.keep) is not None:
                raise ConfigError(f"hydra.launcher.keep={self.keep}: only jobs of ddp_hydra's configs have checkpoints")
            return
        if self.ranks is not None or self.cluster is not None:
            raise ConfigError(
                "hydra.launcher.ranks and hydra.launcher.cluster are for apps whose config is not one of ours: give "
                "dispatch.ranks and cluster instead"
            )
        if self.direction is not None:
            raise ConfigError(
                "hydra.launcher.direction is for apps whose config is not one of ours: give objective.direction instead"
            )


def objective_of(config: DictConfig, direction: str | None = None) -> Objective:
    """Return the metric that jobs are compared by: `objective` of the config, else the return value of the task.

    Args:
        config: of the sweep; `objective` or `hydra.sweeper` may have a direction.
        direction: the launcher's option, which has priority for other apps.
    """
    given = config.get("objective")
    if is_ours(config):
        metric, ours = objective.of(config)
        _check_sweeper(config, metric, ours)
        return Objective(str(metric), _maximizes(ours))
    if isinstance(given, DictConfig) and given.get("metric"):
        return Objective(str(given.metric), _maximizes(direction or given.get("direction")))
    return Objective("value", _maximizes(direction or config.hydra.sweeper.get("direction")))


def _check_sweeper(config: DictConfig, metric: str, direction: object) -> None:
    """Refuse a sweeper that searches in another direction than the objective's: Optuna's own default is minimize.

    Args:
        config: of the sweep.
        metric: the objective.
        direction: of the objective.

    Raises:
        ConfigError: with what to type.
    """
    wants_more = _maximizes(direction)
    for key, found in (
        ("direction", OmegaConf.select(config, "hydra.sweeper.direction")),  # Optuna
        ("ax_config.experiment.minimize", OmegaConf.select(config, "hydra.sweeper.ax_config.experiment.minimize")),
        ("optim.maximize", OmegaConf.select(config, "hydra.sweeper.optim.maximize")),  # Nevergrad
        ("maximize", OmegaConf.select(config, "hydra.sweeper.maximize")),
        ("minimize", OmegaConf.select(config, "hydra.sweeper.minimize")),
    ):
        if found is None:
            continue
        if OmegaConf.is_list(found):
            if len(found) != 1:
                given = "[" + ",".join(str(getattr(one, "name", one)) for one in found) + "]"
                raise ConfigError(
                    f"hydra.sweeper.{key}={given}: a job returns one value, {metric}: give hydra.sweeper.{key}="
                    f"{'maximize' if wants_more else 'minimize'}"
                )
            found = found[0]
        if isinstance(found, bool):
            right: object = wants_more == key.endswith("maximize")
            shown, right_text = str(found).lower(), str(right).lower()
        else:
            shown = str(getattr(found, "name", found))
            right = right_text = "maximize" if wants_more else "minimize"
            found = shown
        if found != right:
            raise ConfigError(
                f"hydra.sweeper.{key}={shown}, but {'more' if wants_more else 'less'} of the objective {metric} is "
                f"better: give hydra.sweeper.{key}={right_text}, or another objective.direction"
            )


def _maximizes(direction: object) -> bool | None:
    """Return whether a direction is "maximize"; None if there is no direction, or one for each of several values."""
    name = getattr(direction, "name", direction)
    return name == "maximize" if name in DIRECTIONS else None
