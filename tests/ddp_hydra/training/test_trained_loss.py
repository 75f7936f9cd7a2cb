"""A loss with parameters of its own: trained with the model, saved, resumed, evaluated, and averaged over ranks."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.errors import ConfigError, NonFiniteLoss
from ddp_hydra.tasks import Classification, Step, Task
from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import BY_LOSS, Numbers, check_resume, flat
from tests.ddp_hydra.training.plain_torch import CONSTANT, begin_alike


class Centres(nn.Module):
    """A centre for each class, to which the loss draws the outputs; it counts its calls in a buffer."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.share, self.centres = share, nn.Parameter(torch.zeros(3, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        begin_alike(self)

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        return F.cross_entropy(prediction, target) + self.share * F.mse_loss(prediction, self.centres[target])


class Net(nn.Linear):
    """Its first weights are always the same."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        begin_alike(self)


LOSS = {
    "model": {"_target_": f"{__name__}.Net"},
    "loss": {"_target_": f"{__name__}.Centres"},
    "scheduler": CONSTANT,
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
}


def by_hand(epochs: int = 2) -> tuple[nn.Module, nn.Module]:
    model, loss, data, sampler = Net(), Centres(), Numbers(9), Distributed(9, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for indices in sampler.batches(epoch):
            optimizer.zero_grad()
            loss(model(data.x[list(indices)]), data.y[list(indices)]).backward()
            optimizer.step()
    return model, loss


def test_a_loss_is_trained_and_saved_as_by_hand(train):
    model, loss = by_hand()
    run = train(whole=LOSS)
    assert "loss      Centres, 9 parameters, trained with the model" in run.records[0].data.lines
    saved = read(run.last)
    assert flat(saved["model"]) == flat(model.state_dict())
    assert flat(saved["loss"]) == flat(loss.state_dict())


@pytest.mark.medium
@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}, {"clip_norm": 0.1}], ids=str)
def test_a_resumed_run_ends_with_the_loss_of_the_uninterrupted_one(train, options):
    check_resume(train, ("update", 3), whole=LOSS, **options)


def test_a_resume_with_another_argument_keeps_what_the_loss_has_learned(train):
    first = train(whole=LOSS, stop_at=("update", 3))
    changed = {**LOSS, "loss": {"_target_": f"{__name__}.Centres", "share": 0.1}}
    resumed = train(whole=changed, resume=first.last, max_steps=3, epochs=None)
    assert flat(read(resumed.last)["loss"]["centres"]) == flat(read(first.last)["loss"]["centres"])


class Wider(nn.Module):
    """Has other centres under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(2, 3))

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(prediction, target) + F.mse_loss(prediction, self.centres.mean(0).expand(len(target), 3))


def test_a_loss_of_another_class_begins_with_its_moments(train):
    first = train(whole={**LOSS, **BY_LOSS}, stop_at=("update", 3))
    changed = {**LOSS, **BY_LOSS, "loss": {"_target_": f"{__name__}.Wider"}}
    resumed = read(train(whole=changed, resume=first.last).last)
    assert resumed["optimizer"]["state"]["loss: centres"]["momentum_buffer"].shape == (2, 3)


class Late(Task):
    """Holds the loss under another name than `criterion`."""

    def __init__(self, criterion: nn.Module) -> None:
        self.centres = criterion

    def step(self, model, batch):
        x, y = batch
        return Step(self.centres(model(x), y))


class Named(Classification):
    """Trains two parts."""

    def updates(self, step):
        return ("one", "two")


def test_what_no_optimizer_trains_is_refused(train):
    parts = {**LOSS, **BY_LOSS, "task": {"_target_": f"{__name__}.Late", "metric": "loss"}}
    with pytest.raises(ConfigError, match=r"Late.centres gets gradients.*name it `criterion`"):
        train(whole=parts)


class Weights(Task):
    """Has the weights of losses as attributes."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.log_vars, self.frozen = at, nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), False)
        self.powers, self.scales = [nn.Parameter(torch.zeros(2))], {"a": 1.0, "b": nn.Parameter(torch.zeros(2))}

    def step(self, model, batch):
        used = {"log_vars": self.log_vars, "powers[0]": self.powers[0], "scales['b']": self.scales["b"]}
        return F.cross_entropy(model(batch[0]), batch[1]) + (used[self.at] + self.frozen).sum()


class WeightsModule(Weights, nn.Module):
    """Is a module, too."""


@pytest.mark.parametrize("task", [Weights, WeightsModule])
@pytest.mark.parametrize("at", ["log_vars", "powers[0]", "scales['b']"])
def test_parameters_of_a_task_that_nothing_trains_are_refused(train, task, at):
    parts = {**BY_LOSS, "task": {"_target_": f"{__name__}.{task.__name__}", "metric": "loss", "at": at}}
    name = re.escape(f"{task.__name__}.{at}")
    with pytest.raises(ConfigError, match=f"{name} gets gradients, but no optimizer trains it.*self.criterion"):
        train(whole=parts)


def test_a_task_of_several_updates_has_no_loss_to_train(train):
    parts = {**LOSS, "task": {"_target_": f"{__name__}.Named"}, "model": {"_target_": f"{__name__}.Parts"}}
    with pytest.raises(ConfigError, match="the loss Centres has parameters"):
        train(whole=parts)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)


class Spoilt(Centres):
    """A mask of -inf in a buffer, and centres that get NaN without a gradient that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = super().forward(prediction, target)
        if self.calls == 3:
            self.centres.data[0] = torch.nan
        return found


def test_no_checkpoint_holds_a_loss_that_is_not_finite(train):
    with pytest.raises(NonFiniteLoss, match=r"not finite \(loss.centres"):
        train(whole={**LOSS, "loss": {"_target_": f"{__name__}.Spoilt"}}, max_steps=3)
