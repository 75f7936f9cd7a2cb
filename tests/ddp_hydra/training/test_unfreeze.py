"""Callbacks that unfreeze parameters, on one rank in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.training.callbacks import Callback, Unfreeze
from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import (
    same,
    with_callbacks,
)

HERE = "tests.ddp_hydra.training.test_unfreeze"


class Net(nn.Sequential):
    """Two layers with a norm between them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def unfrozen(**trainer: Any) -> dict[str, Any]:
    node = ("ddp_hydra.training.callbacks.Unfreeze", {"after_epochs": 2, "parameters": ["0.*", "1.*"], "lr": 0.01})
    return {"model": {"_target_": f"{HERE}.Net", "in_features": None, "out_features": None}, **with_callbacks(u=node)}


@pytest.fixture
def net(monkeypatch):
    """Without the arguments that the loop's tests give their model."""
    monkeypatch.setattr(Net, "__init__", lambda self, in_features, out_features: nn.Sequential.__init__(
        self, nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    ))  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("epochs", [2, 3])
def test_what_was_frozen_is_trained_from_some_epoch_on_also_after_a_resume(train, net, decay_all, epochs):
    given = {"freeze": ["*", "!2.*"], "decay_all": decay_all, "checkpoint_every_steps": 1}
    whole = train(parts=unfrozen(), epochs=4, **given)
    states = {step: read(path) for step, path in zip(whole.steps_saved, map(path_of, whole.saved), strict=True)}
    weights = {step: state["model"]["0.weight"] for step, state in states.items()}
    means = {step: state["model"]["1.running_mean"] for step, state in states.items()}
    assert torch.equal(weights[1], weights[8])
    assert not torch.equal(weights[8], weights[9])
    assert (torch.equal(means[1], means[8]), torch.equal(means[8], means[9])) == (True, False)
    assert [group["initial_lr"] for group in states[9]["optimizer"]["param_groups"]] in (
        [0.1, 0.01],
        [0.1] * 2 + [0.01] * 2,
    )
    resumed = train(parts=unfrozen(), epochs=4, resume=path_of(whole.saved[4 * epochs - 1]), **given)
    assert same(resumed.last, whole.last)


@pytest.mark.medium
def test_a_run_that_is_made_longer_unfreezes_as_one_that_was_so_from_the_beginning(train, net):
    given = {"parts": unfrozen(), "freeze": ["*", "!2.*"]}
    given["parts"]["scheduler"] = {"_target_": "ddp_hydra.training.lr_schedules.constant"}
    first, never = train(epochs=2, **given), train(epochs=4, **given)
    assert "unfrozen" not in read(first.last)
    assert same(train(epochs=4, resume=first.last, **given).last, never.last)


class Thaw(Callback):
    """Unfreezes after some step, of which no checkpoint follows."""

    def on_step(self, run: Any) -> None:
        if run.step == 2:
            run.unfreeze("0.*")


@pytest.mark.medium
@pytest.mark.parametrize(("callback", "bad"), [("ddp_hydra.training.callbacks.Unfreeze", 6), (f"{HERE}.Thaw", 4)])
def test_a_rollback_goes_back_to_where_parameters_were_unfrozen(train, net, callback, bad):
    options = {"after_epochs": 1, "parameters": "0.*"} if callback.endswith("Unfreeze") else {}
    given = {"parts": {**unfrozen(), **with_callbacks(u=(callback, options))}, "freeze": ["*", "!2.*"]}
    given |= {"fault": [f"nan,step={bad}"], "checkpoint_every_epochs": 0}
    rolled = train(on_nonfinite="rollback", **given)
    assert same(rolled.last, train(on_nonfinite="skip", **given).last)


class ThawAgain(Thaw):
    """Unfreezes after the first step, once the run has gone back to it."""

    runs = 0

    def on_step(self, run: Any) -> None:
        self.runs += run.step == 1
        if run.step == 1 and self.runs == 2:
            run.unfreeze(["0.*"])


@pytest.mark.medium
def test_two_rollbacks_lose_nothing_of_the_epoch_means(train, net):
    given = {"parts": {**unfrozen(), **with_callbacks(u=(f"{HERE}.ThawAgain", {}))}, "freeze": ["*", "!2.*"]}
    given["parts"]["optimizer"] = {"lr": 0.0}  # the losses are the same, whatever is frozen
    given |= {"fault": ["nan,step=3", "nan,step=4"], "log_every_steps": 2, "epochs": 1}
    skipped, rolled = (train(on_nonfinite=way, **given) for way in ("skip", "rollback"))
    assert rolled.metrics("train_epoch/loss") == skipped.metrics("train_epoch/loss")


class ThawAmidEpoch(Callback):
    """Unfreezes a layer and its BatchNorm amid the second epoch."""

    def on_step(self, run: Any) -> None:
        if run.step == 6:
            run.unfreeze(["0.*", "1.*"])


@pytest.mark.medium
def test_layers_that_are_unfrozen_amid_an_epoch_change_mode_at_once_as_in_a_resumed_run(train, net):
    given = {"parts": {**unfrozen(), **with_callbacks(u=(f"{HERE}.ThawAmidEpoch", {}))}, "freeze": ["*", "!2.*"]}
    given["checkpoint_every_steps"] = 1
    whole = train(**given)
    paths = dict(zip(whole.steps_saved, map(path_of, whole.saved), strict=True))
    means = {step: read(path)["model"]["1.running_mean"] for step, path in paths.items()}
    # It is called after the step: the next one is the first that counts.
    assert [torch.equal(means[step], means[step + 1]) for step in (4, 5, 6, 7)] == [True, True, False, False]
    for step in (5, 6, 7):
        assert same(train(resume=paths[step], **given).last, whole.last)


def path_of(record: Any) -> Path:
    return Path(record.data.source)


@pytest.mark.medium
def test_what_can_not_be_unfrozen_is_said(train, net):
    with pytest.raises(ConfigError, match=r"unfreeze\(.* fits no frozen parameter; nothing is frozen"):
        train(parts=unfrozen(), epochs=3)
    torchs = {"scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2}}
    with pytest.raises(ConfigError, match="can't be unfrozen with StepLR"):
        train(parts={**unfrozen(), **torchs}, epochs=3, freeze=["*", "!2.*"])


def test_a_frozen_part_stays_so_at_the_end_of_the_run():
    callback = Unfreeze(1)
    callback.on_validation(type("run", (), {"epoch": 1, "step": 8, "total_steps": 8})())
    assert callback.state_dict() == {"due": True, "done": False}
