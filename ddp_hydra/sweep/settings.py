"""The options of a sweep: `hydra.launcher`, and the metric that its jobs are compared by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

from hydra.errors import HydraException
from msgspec import Meta
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config import objective
from ddp_hydra.config.hydra_compat import instantiate
from ddp_hydra.config.limits import AtLeast1, PositiveSeconds, check_limits, limits_of
from ddp_hydra.config.targets import is_installed
from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.planned_job import is_ours
from ddp_hydra.sweep.pruning import number_kept
from ddp_hydra.sweep.rows import VALUE, SweepObjective
from ddp_hydra.sweep.stop_rules import (
    Halving,
    Median,
    OptunaRule,
    Patient,
    ReportPolicy,
    Rule,
    Rungs,
    StopPolicy,
    Threshold,
)

STOP = "hydra.launcher.stop"
REPORT_RULES: dict[str, Callable[..., Rule]] = {"median": Median, "patient": Patient, "threshold": Threshold}
RULES = ("asha", "hyperband", *REPORT_RULES)


@dataclass(frozen=True)
class SweepSettings:
    """The options of `hydra.launcher`; docs/sweeps.md says what they do."""

    max_jobs: AtLeast1 | None = None
    fail_fast: bool = False
    retry_failed: bool = False
    job_timeout_s: PositiveSeconds | None = None
    ranks: AtLeast1 | None = None
    cluster: Any = None
    direction: Annotated[Literal["maximize", "minimize"], Meta(description="maximize or minimize")] | None = None
    keep: str | None = "all"
    stop: Any = None

    def __post_init__(self) -> None:
        check_limits("hydra.launcher.", vars(self), limits_of(SweepSettings))
        if self.cluster is not None and self.ranks is None:
            raise ConfigError("hydra.launcher.cluster is for tasks with ranks: give hydra.launcher.ranks=2, too")
        number_kept(self.keep)

    def check(self, is_ours: bool) -> None:
        if not is_ours:
            if number_kept(self.keep) is not None:
                raise ConfigError(f"hydra.launcher.keep={self.keep}: only jobs of ddp_hydra's configs have checkpoints")
            return
        for key, ours in (("ranks", "dispatch.ranks"), ("cluster", "cluster"), ("direction", "objective.direction")):
            if getattr(self, key) is not None:
                raise ConfigError(f"hydra.launcher.{key} is for apps with other configs than ours: give {ours} instead")


def objective_of(config: DictConfig, direction: str | None = None) -> SweepObjective:
    if is_ours(config):
        metric, better = objective.metric_and_direction(config)
        _check_sweeper(config, metric, better)
        return SweepObjective(metric, better == "maximize")
    given = config.get("objective")
    if isinstance(given, DictConfig) and given.get("metric"):
        metric, direction = str(given.metric), direction or given.get("direction")
    else:
        metric = VALUE
    return SweepObjective(metric, _maximizes(direction or config.hydra.sweeper.get("direction")))


def _check_sweeper(config: DictConfig, metric: str, better: str) -> None:
    """Refuse a sweeper that searches in another direction than the objective's.

    By default, Optuna and Ax minimize. Ax and Nevergrad have keys of their own.
    """
    for key in ("direction", "ax_config.experiment.minimize", "optim.maximize", "maximize", "minimize"):
        found = OmegaConf.select(config, f"hydra.sweeper.{key}")
        is_given = key in (config.hydra.get("sweeper") or {})
        if found is None and is_given and is_optuna(config):
            raise ConfigError(f"hydra.sweeper.{key} is null: give objective.direction={better}, as {metric} goes")
        values = list(found) if OmegaConf.is_list(found) else [found]
        right = str(key.endswith(better)).lower() if isinstance(values[0], bool) else better
        typed = [str(one).lower() if isinstance(one, bool) else str(getattr(one, "name", one)) for one in values]
        if found is not None and typed != [right]:
            only = "a job has one objective, and " * (len(typed) > 1)
            raise ConfigError(
                f"hydra.sweeper.{key}={','.join(typed)}, but {only}the objective {metric} goes by {better}: "
                f"give hydra.sweeper.{key}={right}, or another objective.direction"
            )


def is_optuna(config: DictConfig) -> bool:
    return "optuna" in str(OmegaConf.select(config, "hydra.sweeper._target_"))


def check_storage(config: DictConfig) -> None:
    """Refuse a database for Optuna 2 with a version of SQLAlchemy by which it fails with an assertion."""
    storage = OmegaConf.select(config, "hydra.sweeper.storage")
    if not is_optuna(config) or not isinstance(storage, str) or storage.startswith("redis"):
        return
    with suppress(PackageNotFoundError):  # said by who imports it
        optuna, alchemy = version("optuna"), version("sqlalchemy")
        if int(optuna.split(".")[0]) < 3 and int(alchemy.split(".")[0]) > 1:
            raise ConfigError(
                f"hydra.sweeper.storage: Optuna {optuna} needs SQLAlchemy 1 for it, and {alchemy} is installed: "
                "type pip install 'SQLAlchemy<2' 'alembic<1.17'; mlflow needs SQLAlchemy 2, so keep it in another "
                "environment"
            )


def _maximizes(direction: object) -> bool | None:
    return {"maximize": True, "minimize": False}.get(str(getattr(direction, "name", direction)))


def stop_policy(given: Any, objective: SweepObjective, config: DictConfig, ranks: int | None) -> StopPolicy | None:
    """Return what decides which jobs of a sweep are stopped; None: no job is.

    Args:
        given: a rule by its name, a rule with options, a pruner of Optuna by `_target_`, or None.
        config: of the sweep, without the swept overrides.
        ranks: of the tasks of another app.
    """
    if given is None or (is_ours(config) and config.get("dry_run")):
        return None
    options: dict[str, Any] = {"rule": given} if isinstance(given, str) else _options(given)
    check_objective(objective, config, ranks)
    assert objective.maximize is not None
    if "_target_" in options:
        return ReportPolicy(_pruner(options, objective.maximize))
    name = options.pop("rule", None)
    if name not in RULES:
        raise ConfigError(f"{STOP}: there is no rule {name!r}: give {', '.join(RULES)}, or a _target_ of Optuna")
    if name in REPORT_RULES or not is_ours(config):
        if name == "hyperband":
            raise ConfigError(f"{STOP}=hyperband needs jobs that can pause, and jobs of other apps can't: give asha")
        return ReportPolicy(_make(name, REPORT_RULES.get(name, Halving), options, objective.maximize))
    if name == "hyperband":
        options.setdefault("brackets", 3)
    policy: Rungs = _make(name, Rungs, options, objective.maximize)
    return policy


def check_objective(objective: SweepObjective, config: DictConfig, ranks: int | None) -> None:
    if objective.maximize is None:
        raise ConfigError(f"{STOP} needs to know what is better: give hydra.launcher.direction=maximize or minimize")
    if not is_ours(config):
        if ranks is None:
            raise ConfigError(f"{STOP} goes by what ranks report: give hydra.launcher.ranks=1")
        if objective.metric == VALUE and not OmegaConf.select(config, "objective.metric"):
            raise ConfigError(f"{STOP} goes by a metric that ranks report: give +objective.metric=<its name>")
        return
    if objective.metric.startswith("train/"):
        raise ConfigError(f"{STOP} goes by validations: give data.val, and an objective.metric such as val/loss")
    handler = config.results.handler
    if getattr(handler, "value", handler) == "cluster":
        raise ConfigError(f"{STOP} reads the results of jobs here: give results.handler=client")


def _options(given: Any) -> dict[str, Any]:
    found = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    if not isinstance(found, Mapping):
        raise ConfigError(f"{STOP}={given}: give {', '.join(RULES)}, or {{rule: asha, reduction: 3}}")
    return {str(name): value for name, value in found.items()}


def _make(name: str, kind: Callable[..., Any], options: Mapping[str, Any], maximize: bool) -> Any:
    left_out = ("brackets",) if name == "asha" else ()
    types = {key: limit for key, limit in limits_of(vars(kind)["__init__"]).items() if key not in left_out}
    for key in options.keys() - types.keys():
        raise ConfigError(f"{STOP}: {name} has no option {key!r}: there are {', '.join(types)}")
    check_limits(f"{STOP}: ", options, types)
    if name == "threshold" and "bound" not in options:
        raise ConfigError(f"{STOP}: threshold needs bound: give {{rule: threshold, bound: <number>}}")
    return kind(maximize, **options)


def _pruner(options: Mapping[str, Any], maximize: bool) -> OptunaRule:
    try:
        pruner = instantiate(dict(options))
    except (HydraException, ImportError, TypeError, ValueError) as error:
        hint = "" if is_installed("optuna") else " (pip install 'ddp-hydra[optuna]')"
        reason = " ".join(str(error).split())
        raise ConfigError(f"{STOP}: {options['_target_']} can't be made: {reason}{hint}") from None
    return OptunaRule(maximize, pruner)
