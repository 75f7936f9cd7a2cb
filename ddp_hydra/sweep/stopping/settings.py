"""Reads `hydra.launcher.stop`: a rule by its name, a rule with options, or a pruner of Optuna by `_target_`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config.hydra_compat import instantiate
from ddp_hydra.config.targets import is_installed
from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.planned_job import is_ours
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import Objective
from ddp_hydra.sweep.scheduler import RunningJob
from ddp_hydra.sweep.stopping.base import Stopping
from ddp_hydra.sweep.stopping.decisions import Rule
from ddp_hydra.sweep.stopping.interrupting import Interrupting
from ddp_hydra.sweep.stopping.pausing import Pausing
from ddp_hydra.sweep.stopping.pruner import Pruner
from ddp_hydra.sweep.stopping.rules import Halving, Median, Patient, Threshold
from ddp_hydra.sweep.stopping.rungs import Rungs

KEY = "hydra.launcher.stop"
REPORT_RULES: dict[str, Callable[..., Rule]] = {"median": Median, "patient": Patient, "threshold": Threshold}
RULES = ("asha", "hyperband", *REPORT_RULES)
COUNTS = ("first", "reduction", "brackets", "after", "trials", "patience")


def start(
    given: Any,
    objective: Objective,
    queue: JobQueue,
    running: Sequence[RunningJob],
    config: DictConfig,
    ranks: int | None,
) -> Stopping:
    """Return what stops the jobs of a sweep.

    Args:
        given: the option `stop` of the launcher; None for no rule.
        objective: of the sweep.
        queue: of the sweep.
        running: the jobs that have started.
        config: of the sweep, without the swept overrides.
        ranks: of the tasks of another app.

    Raises:
        ConfigError: there is no such rule or option, or the jobs have nothing that a rule could go by.
    """
    if given is None or config.get("dry_run"):
        return Stopping(queue, objective, config)
    options: dict[str, Any] = {"rule": given} if isinstance(given, str) else _plain(given)
    check_objective(objective, config, ranks)
    assert objective.maximize is not None
    if "_target_" in options:
        return Interrupting(_pruner(options, objective.maximize), queue, running, objective, config)
    name = options.pop("rule", None)
    if name not in RULES:
        raise ConfigError(
            f"{KEY}: there is no rule {name!r}: give {', '.join(RULES)}, or a pruner of Optuna by _target_"
        )
    if name in REPORT_RULES or not is_ours(config):
        if name == "hyperband":
            raise ConfigError(f"{KEY}=hyperband needs jobs that can pause, and those of other apps can't: give asha")
        rule = _built(name, REPORT_RULES.get(name, Halving), options, objective.maximize)
        return Interrupting(rule, queue, running, objective, config)
    if name == "hyperband":
        options.setdefault("brackets", 3)
    elif "brackets" in options:
        raise ConfigError(f"{KEY}: asha has no option 'brackets': give rule: hyperband")
    return Pausing(_built(name, Rungs, options, objective.maximize), queue, objective, config)


def check_objective(objective: Objective, config: DictConfig, ranks: int | None) -> None:
    """Refuse a sweep whose jobs report nothing that a rule could go by.

    Raises:
        ConfigError: the message says what to give.
    """
    if objective.maximize is None:
        raise ConfigError(
            f"{KEY} needs to know whether a higher {objective.metric} is better: give "
            "hydra.launcher.direction=maximize or minimize"
        )
    if not is_ours(config):
        if ranks is None:
            raise ConfigError(
                f"{KEY} reads what tasks report by ddp_hydra.results.log, for which they need a rank: give "
                "hydra.launcher.ranks=1"
            )
        return
    if objective.metric.startswith("train/"):
        raise ConfigError(
            f"{KEY} goes by validations, and {objective.metric} is reported between them, too: give data.val and an "
            "objective.metric of the validation, as val/loss"
        )
    handler = config.results.handler
    if getattr(handler, "value", handler) == "cluster":
        raise ConfigError(f"{KEY} reads the results of jobs here: give results.handler=client")


def _plain(given: Any) -> dict[str, Any]:
    found = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    if not isinstance(found, Mapping):
        raise ConfigError(f"{KEY}={given}: give {', '.join(RULES)}, or {{rule: asha, reduction: 3}}")
    return {str(name): value for name, value in found.items()}


def _built(name: str, kind: Callable[..., Any], options: Mapping[str, Any], maximize: bool) -> Any:
    """Build a rule.

    Raises:
        ConfigError: it has no such option, lacks one, or can't have such a value.
    """
    known = {key: part for key, part in inspect.signature(kind).parameters.items() if key != "maximize"}
    if name == "asha":
        known.pop("brackets", None)
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"{KEY}: {name} has no option {key!r}: there are {', '.join(known)}")
        least = 2 if key == "reduction" else 1
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        if not is_number or (key in COUNTS and (not isinstance(value, int) or value < least)):
            wanted = f"a whole number of at least {least}" if key in COUNTS else "a number"
            raise ConfigError(f"{KEY}: {key}={value}: give {wanted}")
    for key, part in known.items():
        if part.default is inspect.Parameter.empty and key not in options:
            raise ConfigError(f"{KEY}: {name} needs {key}: give {{rule: {name}, {key}: <number>}}")
    return kind(maximize, **options)


def _pruner(options: Mapping[str, Any], maximize: bool) -> Pruner:
    try:
        pruner = instantiate(OmegaConf.create(dict(options)))
    except (HydraException, ImportError, TypeError, ValueError) as error:
        hint = "" if is_installed("optuna") else " (pip install 'ddp-hydra[optuna]')"
        reason = " ".join(str(error).split())
        raise ConfigError(f"{KEY}: {options['_target_']} can't be made: {reason}{hint}") from None
    return Pruner(maximize, pruner)
