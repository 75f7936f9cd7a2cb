from __future__ import annotations

import sys

import pytest
import torch

from ddp_hydra.errors import ConfigError
from ddp_hydra.training import load_run
from ddp_hydra.training.checkpoint import read

DATA = {
    "data": {"n": 9, "train": {"_target_": "tests.ddp_hydra.training.loop_runs.Numbers", "n": "${data.n}"}},
    "cluster": {"password": "hunter2"},
}


@pytest.mark.medium
@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_a_trained_model_is_the_one_that_was_evaluated(ema_decay, train, tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").touch()
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.setattr("ddp_hydra.config.project.starter", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = train(ema_decay=ema_decay, parts=DATA)
    content = read(run.last)
    assert "hunter2" not in str(content["config"])
    changed = load_run.load(run.last, overrides=["data.n=7"])
    assert (len(changed.train_set), changed.config["data"]["train"]["n"]) == (7, "${data.n}")
    found = load_run.load(run.last)
    for name, value in (content["ema"] if ema_decay else content)["model"].items():
        assert torch.equal(found.model.state_dict()[name], value)
    assert (found.step, found.model.training, len(found.train_set)) == (8, False, 9)


def test_there_are_two_checkpoints_to_choose_from(tmp_path):
    with pytest.raises(ConfigError, match="which=lst: give best or last"):
        load_run.load(tmp_path, "lst")
