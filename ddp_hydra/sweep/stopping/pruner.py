"""Uses a pruner of Optuna as a rule: `hydra.launcher.stop={_target_: optuna.pruners.MedianPruner}`."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.stopping.decisions import Seen


class Pruner:
    """Asks a pruner about each report, in the order of the decisions.

    A pruner looks at a study, and a study changes with every job that ends. So each report has a study of its own, in
    memory, in which the jobs before have come exactly as far as this report, or to their end; and a copy of the pruner,
    which may keep what it has seen. So a decision does not depend on which of the jobs is still at work.

    Args:
        maximize: whether higher values are better.
        pruner: of Optuna.

    Raises:
        ConfigError: it is not a pruner of Optuna, or Optuna is missing.
    """

    def __init__(self, maximize: bool, pruner: Any) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError("pruners need Optuna: pip install 'ddp-hydra[optuna]'") from None
        if not isinstance(pruner, optuna.pruners.BasePruner):
            raise ConfigError(
                f"hydra.launcher.stop._target_ makes a {type(pruner).__name__}, not a pruner of Optuna: give one of "
                "optuna.pruners, or a class of yours that is derived from optuna.pruners.BasePruner"
            )
        self.optuna, self.pruner = optuna, pruner
        self.direction = "maximize" if maximize else "minimize"
        self.studies: list[Any] = []
        self.notes: dict[int, list[dict[str, Any]]] = {}
        """What the pruner notes at a job, as successive halving does with its rungs: after each report."""

    def judge(self, own: Sequence[float], earlier: Sequence[Seen]) -> str:
        """Return why a job is stopped, or ""."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna 2 calls experimental what is usual in 3 and 4
            is_pruned = self._ask(own, earlier)
        return f"{type(self.pruner).__name__} has pruned it" if is_pruned else ""

    def _ask(self, own: Sequence[float], earlier: Sequence[Seen]) -> bool:
        report, place = len(own), len(earlier)
        study = self._study(report)
        for number in range(len(study.get_trials(deepcopy=False)), place):  # they have no such report
            self._add(study, number, earlier[number].values, earlier[number].end)
        self._add(study, place, own)
        is_pruned = bool(study.pruner.prune(study, study.get_trials()[place]))
        self.notes.setdefault(place, []).append(study.get_trials()[place].system_attrs)
        if is_pruned:
            study.tell(place, state=self.optuna.trial.TrialState.PRUNED)
        else:
            study.tell(place, _value(own))
        return is_pruned

    def _study(self, report: int) -> Any:
        """Return the study of a report."""
        level = self.optuna.logging.get_verbosity()
        self.optuna.logging.set_verbosity(logging.WARNING)  # it would tell of each study
        while len(self.studies) < report:
            pruner = copy.deepcopy(self.pruner)
            study = self.optuna.create_study(study_name="sweep", direction=self.direction, pruner=pruner)
            self.studies.append(study)
        self.optuna.logging.set_verbosity(level)
        return self.studies[report - 1]

    def _add(self, study: Any, place: int, values: Sequence[float], end: str | None = None) -> None:
        """Add a job to a study.

        Args:
            study: of a report.
            place: of the job among all.
            values: its reports.
            end: how it has ended; None: it is the one that is judged.
        """
        states = self.optuna.trial.TrialState
        ended = {None: states.RUNNING, "": states.COMPLETE, "stopped": states.PRUNED, "failed": states.FAIL}[end]
        notes = self.notes.get(place, [])[: len(values)]
        if not values and ended == states.COMPLETE:
            ended = states.FAIL  # it has ended without a value
        study.add_trial(
            self.optuna.trial.create_trial(
                state=ended,
                value=_value(values) if ended in (states.COMPLETE, states.PRUNED) and values else None,
                intermediate_values=dict(enumerate(values, 1)),
                system_attrs=notes[-1] if notes else {},
            )
        )


def _value(values: Sequence[float]) -> float:
    """Return the last value that is a number: a trial of Optuna can't end with NaN."""
    return next((value for value in reversed(values) if not math.isnan(value)), 0.0)
