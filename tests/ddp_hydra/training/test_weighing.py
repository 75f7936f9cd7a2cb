"""The gradient of a step is that of the mean over all things of its micro-batches and ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Step, Task
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.train_step import TrainStep
from ddp_hydra.training.update import Update, Weighing


class Masked(nn.Module):
    """The mean of errors that a mask lets through, as users write it: without any it is 0 / 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, mask):
        return Step((self.layer(x).squeeze(-1).square() * mask).sum() / mask.sum(), mask.sum())


class MaskedTask(Task):
    def step(self, model, batch):
        return model(*batch)


def test_a_micro_batch_of_nothing_adds_nothing_although_its_loss_is_0_by_0():
    torch.manual_seed(0)
    model, weighing = Masked().double(), Weighing(4, StepConsensus())
    x, train_step = torch.randn(4, 3).double(), TrainStep(MaskedTask(), model)
    for part, mask in ((x[:2], torch.tensor([1.0, 1.0])), (x[2:], torch.zeros(2))):
        weighing.weigh(train_step((part, mask)), 2).backward()
    found = [part.grad * weighing.factor([float(weighing.n)]) for part in model.parameters()]
    right = torch.autograd.grad(model(x[:2], torch.ones(2)).loss, list(model.parameters()))
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(found, right, strict=True))


def test_samples_alone_need_no_factor():
    weighing = Weighing(8, StepConsensus())
    loss = torch.tensor(2.0)
    assert weighing.weigh(Step(loss), 8) is loss
    weighing.begin()
    assert [weighing.weigh(Step(loss), size).item() for size in (6, 2)] == [1.5, 0.5]
    assert weighing.factor([8.0]) == weighing.factor([8.0, 8.0, 8.0]) == 1


def test_the_only_loss_of_a_step_is_not_scaled():
    weighing = Weighing(8, StepConsensus())
    for n in (8, 3, torch.tensor(5)):  # the first one decides on N
        weighing.begin()
        loss = torch.tensor(2.0)
        assert weighing.weigh(Step(loss, n), 8, is_only=True) is loss
        assert weighing.factor([float(n)]) == 1
        assert weighing.unweighed([loss])() == 2
    assert weighing.weigh(Step(loss, 4), 8).item() == 1
    weighing.begin()
    assert weighing.weigh(Step(loss * 0, 0), 8, is_only=True) == 0
    weighing.factor([0.0])
    assert weighing.is_empty


def test_where_nothing_counts_the_step_is_empty():
    weighing = Weighing(2, StepConsensus())
    assert weighing.factor([0.0, 0.0]) == 1
    assert weighing.is_empty


@pytest.mark.parametrize("n", [[-1.0, 2.0], [float("nan")], [float("inf")]])
def test_things_are_0_or_more(n):
    with pytest.raises(ValueError, match="0 or more"):
        Weighing(2, StepConsensus()).factor(n)


def test_a_hook_that_keeps_errors_is_refused_where_n_varies():
    weighing = Weighing(2, StepConsensus())
    weighing.refuse_uneven([2.0, 2.0], "powersgd")
    for n in ([1.0, 3.0], [3.0, 3.0]):
        with pytest.raises(ConfigError, match=r"parallel.comm_hook=powersgd is for .* give parallel.comm_hook=auto"):
            weighing.refuse_uneven(n, "powersgd")


@pytest.mark.parametrize("n", [0.0, 1e-300, 0.3, 7.0, 2.0**60])
def test_a_vote_carries_n_exactly(n):
    assert StepConsensus().vote(n=n)().n == (n,)
    assert StepConsensus().vote(n=lambda: n)().n == (n,)


def test_a_negative_n_does_not_pass_as_0():
    (found,) = StepConsensus().vote(n=-1.0)().n
    assert found == math.inf


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_scaled_gradients_are_unscaled_before_the_factor(clip_norm):
    """fp16: clipping and the update see gradients of the true size."""
    from ddp_hydra.training.parallel import PartStep

    def trained(scaler, counts):
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2), torch.randn(8, 3)
        step = TrainStep(Task(), model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = PartStep(step)
        update = Update("", wrapped, optimizer, None, scaler, Weighing(8, StepConsensus()), clip_norm)
        for rows in counts:
            update.begin()
            losses = []
            for part in rows:
                loss = update.weighing.weigh(Step(F.mse_loss(model(x[part]), x[part][:, :2]), len(x[part])), 4)
                losses.append(loss.detach())
                update.backward(loss)
            assert update.find_nonfinite(update.vote(losses, 0)(), losses) is None
            update.apply()
        return model.weight.detach()

    steps = [(slice(0, 1), slice(1, 4)), (slice(0, 7), slice(7, 8)), (slice(0, 2), slice(2, 4))]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    right = trained(torch.amp.GradScaler("cpu", enabled=False), [(slice(a.start, b.stop),) for a, b in steps])
    assert torch.allclose(trained(scaler, steps), right, atol=1e-6)
    assert torch.allclose(trained(torch.amp.GradScaler("cpu", enabled=False), steps), right, atol=1e-6)


def test_messages_show_the_mean_of_this_rank_not_the_weighed_sum():
    weighing = Weighing(4, StepConsensus())
    losses = [weighing.weigh(Step(torch.tensor(loss), n), 2) for loss, n in ((2.0, 1.0), (5.0, 3.0))]
    assert weighing.unweighed(losses)() == pytest.approx((2 * 1 + 5 * 3) / 4)
    summed = Weighing(4, StepConsensus())
    losses = [summed.weigh(Step(torch.tensor(loss), summed=True), 2) for loss in (2.0, 5.0)]
    assert summed.unweighed(losses)() == 7
