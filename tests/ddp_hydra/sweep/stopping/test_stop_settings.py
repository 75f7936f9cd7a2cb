"""`hydra.launcher.stop`: what it may say, and what is refused at once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.rows import Objective
from ddp_hydra.sweep.stopping import settings
from ddp_hydra.sweep.stopping.base import Stopping
from ddp_hydra.sweep.stopping.interrupting import Interrupting
from ddp_hydra.sweep.stopping.pausing import Pausing
from ddp_hydra.sweep.stopping.pruner import Pruner
from ddp_hydra.sweep.stopping.rules import Halving, Median, Patient, Threshold

OURS = {
    "cluster": {"_target_": "distributed.LocalCluster"},
    "dispatch": {"ranks": 1},
    "trainer": {"epochs": 3, "max_steps": None, "pause_after_validations": None},
    "results": {"handler": "client"},
}


def start(
    given: Any,
    ours: bool = True,
    metric: str = "val/loss",
    maximize: bool | None = False,
    ranks: int | None = None,
    **more: Any,
) -> Any:
    config = OmegaConf.merge(OURS if ours else {"lr": 1}, more)
    assert isinstance(config, DictConfig)
    return settings.start(given, Objective(metric, maximize), None, [], config, ranks)  # type: ignore[arg-type]


def test_without_a_rule_or_in_a_dry_run_no_job_is_stopped():
    assert type(start(None)) is Stopping
    assert type(start("asha", dry_run=True)) is Stopping
    assert type(start(None, maximize=None)) is Stopping


def test_jobs_of_ours_are_paused_by_asha_and_hyperband():
    asha = start("asha")
    assert isinstance(asha, Pausing)
    assert (asha.rungs.first, asha.rungs.reduction, asha.rungs.maximize, len(asha.rungs.rungs)) == (1, 3, False, 1)
    hyperband = start(OmegaConf.create({"rule": "hyperband", "brackets": 2, "first": 2, "reduction": 4}))
    assert (hyperband.rungs.first, hyperband.rungs.reduction, len(hyperband.rungs.rungs)) == (2, 4, 2)
    assert len(start("hyperband").rungs.rungs) == 3


@pytest.mark.parametrize(
    ("given", "kind"),
    [("median", Median), ("patient", Patient), ({"rule": "threshold", "bound": 0.5}, Threshold)],
)
def test_the_other_rules_interrupt_jobs(given, kind):
    for ours in (True, False):
        made = start(given, ours=ours, ranks=None if ours else 2)
        assert isinstance(made, Interrupting)
        assert isinstance(made.decisions.rule, kind)


def test_jobs_of_other_apps_are_stopped_at_the_rungs_of_asha():
    made = start({"rule": "asha", "first": 2}, ours=False, ranks=1)
    assert isinstance(made.decisions.rule, Halving)


@pytest.mark.medium
def test_a_pruner_of_optuna_is_given_by_its_class():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optuna = pytest.importorskip("optuna")
    pruner = {"_target_": "optuna.pruners.SuccessiveHalvingPruner", "reduction_factor": 2}
    made = start(pruner)
    assert isinstance(made.decisions.rule, Pruner)
    assert isinstance(made.decisions.rule.pruner, optuna.pruners.SuccessiveHalvingPruner)


@pytest.mark.parametrize(
    ("given", "arguments", "words"),
    [
        ("ascha", {}, "there is no rule 'ascha': give asha, hyperband, median, patient, threshold, or a pruner"),
        ({"first": 1}, {}, "there is no rule None"),
        (3, {}, r"hydra.launcher.stop=3: give asha, .* or \{rule: asha, reduction: 3\}"),
        ({"rule": "asha", "warmup": 1}, {}, "asha has no option 'warmup': there are first, reduction$"),
        ({"rule": "asha", "brackets": 2}, {}, "asha has no option 'brackets': give rule: hyperband"),
        ({"rule": "asha", "reduction": 1}, {}, "reduction=1: give a whole number of at least 2"),
        ({"rule": "median", "trials": 1.5}, {}, "trials=1.5: give a whole number of at least 1"),
        ({"rule": "threshold", "bound": "x"}, {}, "bound=x: give a number"),
        ("threshold", {}, r"threshold needs bound: give \{rule: threshold, bound: <number>\}"),
        pytest.param(
            {"_target_": "builtins.dict"}, {}, "makes a dict, not a pruner of Optuna", marks=pytest.mark.medium
        ),
        pytest.param(
            {"_target_": "optuna.pruners.Nothing"}, {}, "optuna.pruners.Nothing can't be made", marks=pytest.mark.medium
        ),
        ("asha", {"maximize": None, "ours": False, "ranks": 1}, "give hydra.launcher.direction=maximize or minimize"),
        ("asha", {"ours": False}, "give hydra.launcher.ranks=1"),
        ("hyperband", {"ours": False, "ranks": 1}, "those of other apps can't: give asha"),
        ("asha", {"metric": "train/loss"}, "train/loss is reported between them, too"),
        ("asha", {"results": {"handler": "cluster"}}, "give results.handler=client"),
        ("asha", {"trainer": {"pause_after_validations": 2}}, "leave out trainer.pause_after_validations"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_give(given, arguments, words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna 2 warns of another package when it is imported
        with pytest.raises(ConfigError, match=words):
            start(given, **arguments)
