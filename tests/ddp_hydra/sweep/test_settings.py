"""What a sweep is told."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.rows import SweepObjective
from ddp_hydra.sweep.settings import SweepSettings, check_storage, objective_of, stop_policy
from ddp_hydra.sweep.stop_rules import Halving, Median, Patient, ReportPolicy, Rungs, Threshold

OURS = {"cluster": {"_target_": "distributed.LocalCluster"}, "dispatch": {}, "trainer": {}}
STOPPABLE = {**OURS, "results": {"handler": "client"}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_jobs": 0},
        {"job_timeout_s": 0},
        {"direction": "up"},
    ],
)
def test_what_cannot_be_is_refused_by_its_key(wrong):
    with pytest.raises(ConfigError, match=rf"hydra\.launcher\.{next(iter(wrong))}=.*null"):
        SweepSettings(**wrong)


def test_what_is_for_tasks_with_ranks_is_refused_elsewhere():
    with pytest.raises(ConfigError, match=r"give hydra\.launcher\.ranks=2"):
        SweepSettings(cluster={"n_workers": 2})
    with pytest.raises(ConfigError, match=r"give dispatch\.ranks instead"):
        SweepSettings(ranks=2).check(is_ours=True)
    with pytest.raises(ConfigError, match=r"give objective\.direction instead"):
        SweepSettings(direction="maximize").check(is_ours=True)
    SweepSettings(max_jobs=2).check(is_ours=True)


@pytest.mark.parametrize("keep", ["best", "best:0", "best:-1", 5])
def test_what_to_keep_is_checked(keep):
    with pytest.raises(ConfigError, match=rf"hydra\.launcher\.keep={keep}: give all, none or best:5"):
        SweepSettings(keep=keep)
    with pytest.raises(ConfigError, match="only jobs of ddp_hydra's configs have checkpoints"):
        SweepSettings(keep="none").check(is_ours=False)


@pytest.mark.parametrize(
    ("config", "direction", "objective"),
    [
        (
            {"objective": {"metric": "val/loss", "direction": "minimize"}},
            None,
            SweepObjective("val/loss", maximize=False),
        ),
        (OURS | {"objective": {"metric": "val/loss"}}, None, SweepObjective("val/loss", maximize=False)),
        (OURS | {"objective": {"metric": "a", "direction": "maximize"}}, None, SweepObjective("a", maximize=True)),
        ({}, None, SweepObjective("value", maximize=None)),
        ({"hydra": {"sweeper": {"direction": ["maximize", "minimize"]}}}, None, SweepObjective("value", maximize=None)),
    ],
)
def test_the_objective_is_the_configs_or_what_the_task_returns(config, direction, objective):
    assert objective_of(OmegaConf.create({"hydra": {"sweeper": {}}} | config), direction) == objective


@pytest.mark.parametrize(
    ("sweeper", "metric", "typed"),
    [
        ({"direction": "minimize"}, "val/accuracy", r"hydra.sweeper.direction=maximize"),
        (
            {"direction": None, "_target_": "x.optuna_sweeper.OptunaSweeper"},
            "val/accuracy",
            r"direction is null: give objective.direction=maximize, as val/accuracy goes",
        ),
        ({"direction": None, "_target_": "x.AxSweeper"}, "val/accuracy", None),
        ({"direction": "maximize"}, "val/accuracy", None),
        ({"direction": ["maximize"]}, "val/accuracy", None),
        (
            {"direction": ["maximize", "minimize"]},
            "val/accuracy",
            r"a job has one objective, and .*goes by maximize: give.*direction=maximize",
        ),
        ({"ax_config": {"experiment": {"minimize": True}}}, "val/accuracy", r"experiment.minimize=false"),
        ({"ax_config": {"experiment": {"minimize": True}}}, "val/loss", None),
        ({"optim": {"maximize": False}}, "val/accuracy", r"optim.maximize=true"),
        ({}, "val/accuracy", None),
    ],
)
def test_a_sweeper_searches_in_the_direction_of_the_objective(sweeper, metric, typed):
    config = OmegaConf.create({**OURS, "objective": {"metric": metric}, "hydra": {"sweeper": sweeper}})
    if typed is None:
        assert objective_of(config).metric == metric
    else:
        with pytest.raises(ConfigError, match=typed):
            objective_of(config)


@pytest.mark.parametrize(
    ("sweeper", "optuna", "alchemy", "is_refused"),
    [
        ({"storage": "sqlite:///a.db"}, "2.10.1", "2.0.58", True),
        ({"storage": "postgresql://me:secret@host/a"}, "2.10.1", "2.1.9", True),
        ({"storage": "sqlite:///a.db"}, "2.10.1", "1.4.54", False),
        ({"storage": "sqlite:///a.db"}, "3.0.0", "2.0.58", False),
        ({"storage": "redis://host/a"}, "2.10.1", "2.0.58", False),
        ({"storage": None}, "2.10.1", "2.0.58", False),
        ({"storage": "sqlite:///a.db", "_target_": "mine.Sweeper"}, "2.10.1", "2.0.58", False),
        ({}, "2.10.1", "2.0.58", False),
    ],
)
def test_a_database_that_optuna_cannot_use_is_refused_with_what_to_type(
    sweeper, optuna, alchemy, is_refused, monkeypatch
):
    monkeypatch.setattr("ddp_hydra.sweep.settings.version", {"optuna": optuna, "sqlalchemy": alchemy}.__getitem__)
    sweeper = {"_target_": "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper", **sweeper}
    typed = "type pip install 'SQLAlchemy<2' 'alembic<1.17'"
    said = rf"storage: Optuna 2\.10\.1 needs SQLAlchemy 1 .*{alchemy} is installed: {typed}"
    with pytest.raises(ConfigError, match=said) if is_refused else nullcontext():
        check_storage(OmegaConf.create({"hydra": {"sweeper": sweeper}}))


def policy(
    given: Any,
    ours: bool = True,
    metric: str = "val/loss",
    maximize: bool | None = False,
    ranks: int | None = None,
    **more: Any,
) -> Any:
    config = OmegaConf.merge(STOPPABLE if ours else {"lr": 1}, more)
    assert isinstance(config, DictConfig)
    return stop_policy(given, SweepObjective(metric, maximize), config, ranks)


def test_jobs_of_ours_are_paused_by_asha_and_hyperband():
    asha = policy("asha")
    assert isinstance(asha, Rungs)
    assert (asha.first, asha.reduction, asha.maximize, len(asha.rungs)) == (1, 3, False, 1)
    hyperband = policy(OmegaConf.create({"rule": "hyperband", "brackets": 2, "first": 2, "reduction": 4}))
    assert (hyperband.first, hyperband.reduction, len(hyperband.rungs)) == (2, 4, 2)
    assert len(policy("hyperband").rungs) == 3
    assert policy(None) is policy("asha", dry_run=True) is None
    own = {"ours": False, "ranks": 1, "dry_run": True}  # another app's own key
    assert isinstance(policy({"rule": "asha", "first": 2}, **own).rule, Halving)


def test_a_rule_for_another_app_needs_a_metric_and_takes_the_sweepers_direction():
    with pytest.raises(ConfigError, match=r"goes by a metric that ranks report: give \+objective\.metric="):
        policy("asha", ours=False, metric="value", ranks=1)
    assert policy("asha", ours=False, metric="value", ranks=1, objective={"metric": "value"})
    sweeper = {"sweeper": {"direction": "maximize"}}
    for own, maximize in [({}, True), ({"direction": "minimize"}, False)]:
        config = OmegaConf.create({"hydra": sweeper, "objective": {"metric": "score"} | own})
        assert objective_of(config) == SweepObjective("score", maximize)


@pytest.mark.parametrize(
    ("given", "kind"),
    [("median", Median), ("patient", Patient), ({"rule": "threshold", "bound": 0.5}, Threshold)],
)
def test_the_other_rules_interrupt_jobs(given, kind):
    for ours in (True, False):
        made = policy(given, ours=ours, ranks=None if ours else 2)
        assert isinstance(made, ReportPolicy)
        assert isinstance(made.rule, kind)


@pytest.mark.parametrize(
    ("given", "arguments", "words"),
    [
        (
            "ascha",
            {},
            "there is no rule 'ascha': give asha, hyperband, median, patient, threshold, or a _target_ of Optuna",
        ),
        (3, {}, r"hydra.launcher.stop=3: give asha, .* or \{rule: asha, reduction: 3\}"),
        ({"rule": "asha", "brackets": 2}, {}, "asha has no option 'brackets': there are first, reduction$"),
        ({"rule": "asha", "reduction": 1}, {}, "reduction=1: give a whole number of at least 2"),
        ({"rule": "threshold", "bound": "x"}, {}, "bound=x: give a number"),
        ("threshold", {}, r"threshold needs bound: give \{rule: threshold, bound: <number>\}"),
        ("asha", {"maximize": None, "ours": False, "ranks": 1}, "give hydra.launcher.direction=maximize or minimize"),
        ("asha", {"ours": False}, "give hydra.launcher.ranks=1"),
        ("hyperband", {"ours": False, "ranks": 1}, "jobs of other apps can't: give asha"),
        ("asha", {"metric": "train/loss"}, "goes by validations"),
        ("asha", {"results": {"handler": "cluster"}}, "give results.handler=client"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_give(given, arguments, words):
    with pytest.raises(ConfigError, match=words):
        policy(given, **arguments)
