"""The loop meets losses and gradients that are not finite."""

from __future__ import annotations

import pytest
import torch

from ddp_hydra import heartbeat
from ddp_hydra.data.samplers import Distributed
from ddp_hydra.errors import NonFiniteLoss
from ddp_hydra.tasks import Task
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.optimizers import UpdateBuilder
from tests.ddp_hydra.training.loop_runs import BY_LOSS, flat, same, weights
from tests.ddp_hydra.training.test_buffers import Changing


def test_a_step_with_a_bad_loss_ends_the_run_by_default(train):
    with pytest.raises(NonFiniteLoss, match="the loss is nan in step 6; samples of this rank: "):
        train(fault=["nan,step=6"])


def test_a_step_with_a_bad_loss_may_be_left_out(train):
    run = train(fault=["nan,step=6"], on_nonfinite="skip")
    assert (run.value["steps"], run.steps_saved) == (8, [4, 8])
    assert all(value == value for _, value in run.metrics("train/loss"))


def test_nothing_is_logged_where_no_step_has_counted(train):
    parts = {**BY_LOSS, "model": {"out_features": 1}, "loss": {"_target_": "torch.nn.MSELoss"}}
    parts |= {"task": {"_target_": "ddp_hydra.tasks.Regression"}}
    run = train(fault=["nan,step=1"], on_nonfinite="skip", log_every_steps=1, max_steps=2, val=0, parts=parts)
    assert [step for step, _ in run.metrics("train/loss")] == [2]


@pytest.mark.medium
@pytest.mark.parametrize(("step", "every"), [(1, 3), (4, 0), (4, 3), (6, 3)])
def test_a_rollback_comes_to_the_same_end_as_leaving_the_step_out(step, every, train):
    fault, log = [f"nan,step={step}"], {"log_every_steps": 1}
    skipped = train(fault=fault, on_nonfinite="skip", checkpoint_every_steps=every, **log)
    rolled = train(fault=fault, on_nonfinite="rollback", checkpoint_every_steps=every, **log)
    assert same(rolled.last, skipped.last)
    assert (rolled.value["steps"], rolled.value["samples"]) == (8, 16)
    assert rolled.metrics("val/loss") == skipped.metrics("val/loss")
    assert dict(rolled.metrics("train/loss")) == dict(skipped.metrics("train/loss"))
    assert min(speed for _, speed in rolled.metrics("samples_per_s")) >= 0


class Remembering(torch.nn.CrossEntropyLoss):
    """Has a buffer that is None at first, one that grows, and one that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)
        self.register_buffer("bank", torch.zeros(0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            self.seen = x.detach().sum(0)
            self.bank = torch.cat([self.bank, y[:1]])
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.ones(1))
        return super().forward(x, y)


@pytest.mark.parametrize("every", [0, 3])
def test_a_rollback_goes_back_to_buffers_of_other_shapes(train, every):
    parts = {"model": {"_target_": f"{Changing.__module__}.Changing"}}
    parts |= {"loss": {"_target_": f"{__name__}.Remembering"}}
    options = {"parts": parts, "ema_decay": 0.9, "checkpoint_every_epochs": 0, "checkpoint_every_steps": every}
    skipped, rolled = (train(fault=["nan,step=6"], on_nonfinite=way, **options) for way in ("skip", "rollback"))
    assert same(rolled.last, skipped.last)
    for part in ("model", "ema", "loss"):
        assert flat(read(rolled.last)[part]) == flat(read(skipped.last)[part])


class Cached(torch.nn.Linear):
    """Knows the size of a buffer that no checkpoint has."""

    def __init__(self, in_features: int = 4, out_features: int = 3) -> None:
        super().__init__(in_features, out_features)
        self.size = 0
        self.register_buffer("scale", torch.ones(0, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.size:
            self.size, self.scale = len(x), torch.ones(len(x), 1)
        return super().forward(x) * self.scale[: len(x)]


def test_a_buffer_that_no_checkpoint_has_stays_in_a_rollback(train):
    parts = {"model": {"_target_": f"{__name__}.Cached"}}
    assert train(fault=["nan,step=2"], on_nonfinite="rollback", parts=parts).value["steps"] == 8


def test_what_was_counted_before_a_rollback_is_not_counted_twice(train):
    options = {"log_every_steps": 4, "checkpoint_every_epochs": 0}
    skipped = train(fault=["nan,step=3"], on_nonfinite="skip", **options)
    rolled = train(fault=["nan,step=3"], on_nonfinite="rollback", **options)
    assert rolled.metrics("train/loss") == skipped.metrics("train/loss")
    assert all(speed > 0 for _, speed in rolled.metrics("samples_per_s"))


def test_a_rollback_may_go_back_into_the_epoch_before(train):
    options = {"epochs": 3, "checkpoint_every_epochs": 0, "checkpoint_every_steps": 3}
    run = train(fault=["nan,step=6"], on_nonfinite="rollback", **options)
    assert run.value["steps"] == 12
    assert [step for step, _ in run.metrics("val/loss")] == [4, 4, 8, 12]


class Pair(torch.nn.Module):
    """Two parts, each of which an update trains."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)


class Spoils(Task):
    """A weight becomes NaN after the step of its part, though no gradient is."""

    def updates(self, step):
        return ("one", "two")

    def step(self, model, batch, update=""):
        if update == "two" and model.training:
            model.one.weight.data.fill_(torch.nan)
        return torch.nn.functional.cross_entropy(model.get_submodule(update)(batch[0]), batch[1])


def test_no_checkpoint_holds_a_part_that_is_not_finite(train):
    whole = {"model": {"_target_": f"{__name__}.Pair"}, "task": {"_target_": f"{__name__}.Spoils", "metric": "loss"}}
    with pytest.raises(NonFiniteLoss, match=r"the state after step 1 is not finite \(one.weight"):
        train(whole=whole, parts={"objective": {"metric": "train/one/loss"}}, max_steps=1, val=0)


def test_too_many_bad_steps_end_the_run(train):
    with pytest.raises(NonFiniteLoss, match=r"in step 3, and 2 such .*, or allow more such steps with trainer\.max_"):
        train(fault=["nan"], on_nonfinite="skip", max_nonfinite=2)


class Spoilt(torch.nn.Linear):
    """Has a loss that is finite, and in step 6 gradients that are not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training and heartbeat.here().step == 6:
            y.register_hook(lambda gradient: gradient * float("nan"))
        return y


SPOILT = {"model": {"_target_": f"{__name__}.Spoilt"}}


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def as_on_a_gpu(request, monkeypatch) -> None:
    """Look at gradients at once, and when the next loss is looked at."""
    first = UpdateBuilder.first

    def forced(*arguments):
        updates = first(*arguments)
        for update in updates.values():
            update.late = request.param
        return updates

    monkeypatch.setattr(UpdateBuilder, "first", forced)


def test_a_step_with_a_bad_gradient_ends_the_run_by_default(as_on_a_gpu, train):
    samples = ", ".join(map(str, list(Distributed(9, 2).batches(1))[1]))
    said = rf"the gradient of weight, bias is not finite in step 6, although the loss is \d.*; samples .*: {samples}\. "
    with pytest.raises(NonFiniteLoss, match=said):
        train(parts=SPOILT, log_every_steps=100)


@pytest.mark.medium
@pytest.mark.parametrize("every", [0, 5])
def test_a_step_with_a_bad_gradient_may_be_rolled_back_from(every, as_on_a_gpu, train):
    options = {"parts": SPOILT, "checkpoint_every_steps": every, "ema_decay": 0.9, "log_every_steps": 100}
    rolled = train(on_nonfinite="rollback", **options)
    assert weights(rolled).isfinite().all()
    assert same(rolled.last, train(fault=["nan,step=6"], on_nonfinite="skip", **{**options, "parts": None}).last)


@pytest.mark.medium
def test_leaving_out_a_step_with_a_bad_gradient_is_as_with_a_bad_loss(train):
    spoilt, fault = train(on_nonfinite="skip", parts=SPOILT), train(on_nonfinite="skip", fault=["nan,step=6"])
    assert same(spoilt.last, fault.last)
    assert weights(spoilt).isfinite().all()


def test_weights_that_are_not_finite_are_never_saved(train, tmp_path):
    steep = {"optimizer": {"lr": 3e38, "momentum": 0, "weight_decay": 10.0}}
    with pytest.raises(NonFiniteLoss, match=r"the state after step 1 is not finite \(weight"):
        train(max_steps=1, parts=steep)
    assert list((tmp_path / "1").iterdir()) == []
