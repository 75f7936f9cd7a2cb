"""What a sweep is told."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.rows import Objective
from ddp_hydra.sweep.settings import Settings, objective_of

OURS = {"cluster": {"_target_": "distributed.LocalCluster"}, "dispatch": {}, "trainer": {}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_jobs": 0},
        {"max_jobs": True},
        {"ranks": "two"},
        {"job_timeout_s": 0},
        {"job_timeout_s": "long"},
        {"direction": "up"},
    ],
)
def test_what_cannot_be_is_refused_by_its_key(wrong):
    with pytest.raises(ConfigError, match=rf"hydra\.launcher\.{next(iter(wrong))}=.*null"):
        Settings(**wrong)


def test_what_is_for_tasks_with_ranks_is_refused_elsewhere():
    with pytest.raises(ConfigError, match=r"give hydra\.launcher\.ranks=2"):
        Settings(cluster={"n_workers": 2})
    with pytest.raises(ConfigError, match=r"give dispatch\.ranks and cluster instead"):
        Settings(ranks=2).check(is_ours=True)
    with pytest.raises(ConfigError, match=r"give objective\.direction instead"):
        Settings(direction="maximize").check(is_ours=True)
    Settings(max_jobs=2).check(is_ours=True)


@pytest.mark.parametrize("keep", ["best", "best:0", "best:-1", "best:x", "some", 5, True])
def test_what_to_keep_is_checked(keep):
    with pytest.raises(ConfigError, match=rf"hydra\.launcher\.keep={keep}: give all, none or best:5"):
        Settings(keep=keep)


def test_other_apps_have_no_checkpoints_to_keep():
    with pytest.raises(ConfigError, match="only jobs of ddp_hydra's configs have checkpoints"):
        Settings(keep="none").check(is_ours=False)
    Settings(keep=None).check(is_ours=False)
    Settings(keep="none").check(is_ours=True)


@pytest.mark.parametrize(
    ("config", "direction", "objective"),
    [
        ({"objective": {"metric": "val/loss", "direction": "minimize"}}, None, Objective("val/loss", maximize=False)),
        ({"objective": {"metric": "val/accuracy"}}, None, Objective("val/accuracy", maximize=None)),
        (OURS | {"objective": {"metric": "val/loss"}}, None, Objective("val/loss", maximize=False)),
        (OURS | {"objective": {"metric": "a", "direction": "maximize"}}, None, Objective("a", maximize=True)),
        ({}, None, Objective("value", maximize=None)),
        ({}, "maximize", Objective("value", maximize=True)),
        ({"objective": 3, "hydra": {"sweeper": {"direction": "maximize"}}}, None, Objective("value", maximize=True)),
        ({"hydra": {"sweeper": {"direction": ["maximize", "minimize"]}}}, None, Objective("value", maximize=None)),
    ],
)
def test_the_objective_is_the_configs_or_what_the_task_returns(config, direction, objective):
    assert objective_of(OmegaConf.create({"hydra": {"sweeper": {}}} | config), direction) == objective


@pytest.mark.parametrize(
    ("sweeper", "metric", "typed"),
    [
        ({"direction": "minimize"}, "val/accuracy", r"hydra.sweeper.direction=maximize"),
        ({"direction": "maximize"}, "val/accuracy", None),
        ({"direction": "minimize"}, "val/loss", None),
        ({"direction": ["maximize"]}, "val/accuracy", None),
        ({"direction": ["maximize", "minimize"]}, "val/accuracy", r"one value.*direction=maximize"),
        ({"ax_config": {"experiment": {"minimize": True}}}, "val/accuracy", r"experiment.minimize=false"),
        ({"ax_config": {"experiment": {"minimize": True}}}, "val/loss", None),
        ({"optim": {"maximize": False}}, "val/accuracy", r"optim.maximize=true"),
        ({"optim": {"maximize": False}}, "val/loss", None),
        ({"direction": None}, "val/accuracy", None),
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
