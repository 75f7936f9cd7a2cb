from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn

from ddp_hydra.tasks import Task
from ddp_hydra.training import lr_schedules
from ddp_hydra.training.consensus import Decision, StepConsensus
from ddp_hydra.training.finite import GradientNorms, are_finite, not_finite
from ddp_hydra.training.parallel import Parallel, PartStep
from ddp_hydra.training.parallel.weights import Ema
from ddp_hydra.training.state import Position, TrainingState
from ddp_hydra.training.train_step import TrainStep
from ddp_hydra.training.update import Update, Weighing

NAN, INF = math.nan, math.inf
PARTS = [([1.0], True), ([1.0, 2.0], True), ([math.nan], False), ([1.0, math.inf, 2.0], False)]


@pytest.mark.parametrize(("losses", "finite"), PARTS)
def test_a_step_is_good_whose_parts_all_have_numbers(losses, finite):
    assert are_finite([torch.tensor(loss) for loss in losses]) is finite


@pytest.mark.gpu
@pytest.mark.parametrize(("losses", "finite"), PARTS)
def test_on_a_gpu_it_is_known_later(losses, finite):
    look = are_finite([torch.tensor(loss, device="cuda") for loss in losses])
    assert look() is finite


# -- gradients -------------------------------------------------------------------------------------------------


def named(*gradients):
    return list(zip("abcdefgh", gradients, strict=False))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_gradients_that_are_not_finite_are_named(value):
    bad = torch.tensor([[1.0, value]])
    assert GradientNorms(named(torch.ones(3), bad, torch.zeros(2), bad.clone())).nonfinite_names() == ["b", "d"]
    assert GradientNorms(named(torch.ones(3), torch.zeros(2))).nonfinite_names() == []


def test_gradients_of_other_types_and_sparse_ones_are_looked_at_too():
    half = torch.full((9,), 60_000.0, dtype=torch.float16)  # its length is none of 16 bits
    sparse = torch.sparse_coo_tensor([[1]], [[NAN]], (3, 1), check_invariants=True)
    gradients = GradientNorms(named(half, torch.ones(2, dtype=torch.float64), sparse))
    assert (gradients.nonfinite_names(), gradients.sparse) == (["c"], True)
    assert GradientNorms([]).nonfinite_names() == []


def test_gradients_that_are_checked_late_are_not_kept():
    made, model = update(late=True)
    gradient = weakref.ref(model.weight.grad)
    assert made.find_nonfinite(vote(made, 1.0), [torch.tensor(1.0)]) is None
    made.apply()
    made.begin()
    assert (made.unchecked is not None, gradient()) == (True, None)


@pytest.mark.parametrize("longest", [0.05, 1e9])
def test_gradients_are_clipped_as_torch_clips_them_to_the_bit(longest):
    made = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (7, 1000, 3)]
    theirs = [nn.Parameter(torch.zeros_like(one)) for one in made]
    for parameter, gradient in zip(theirs, made, strict=True):
        parameter.grad = gradient.clone()
    gradients = GradientNorms(named(*made))
    gradients.clip(made, longest)
    assert torch.equal(gradients.total_norm, nn.utils.clip_grad_norm_(theirs, longest))
    assert all(torch.equal(a, b.grad) for a, b in zip(made, theirs, strict=True))


# -- whether a step may count ----------------------------------------------------------------------------------


def update(late=False, precision=None, same_gradients=True):
    """Of a model with a weight and a bias."""
    model = nn.Linear(1, 1)
    step = TrainStep(Task(), model)
    wrapped = PartStep(step)
    wrapped.same_gradients = same_gradients
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    optimizer, weighing = torch.optim.SGD(model.parameters(), 0.1), Weighing(1, StepConsensus())
    made = Update("", wrapped, optimizer, None, scaler, weighing, late=late)
    model.weight.grad, model.bias.grad = torch.ones(1, 1), torch.ones(1)
    return made, model


def vote(made, loss):
    return made.vote([torch.tensor(loss)], 0)()


@pytest.mark.parametrize("same_gradients", [True, False])
def test_a_step_whose_gradient_is_not_finite_is_found_though_its_loss_is(same_gradients):
    made, model = update(same_gradients=same_gradients)
    losses = [torch.tensor(0.25), torch.tensor(0.5)]
    assert made.find_nonfinite(Decision(), losses) is None
    model.weight.grad = torch.full((1, 1), NAN)
    found = made.find_nonfinite(Decision(), losses)
    assert (found.bad_rank, found.loss, found.gradients, found.steps_ago) == (0, 0.75, ["weight"], 0)
    found = made.find_nonfinite(Decision(bad_rank=3), losses)
    assert (found.bad_rank, found.gradients) == (3, ())


def test_what_overflows_in_fp16_is_the_scalers():
    made, model = update(precision="fp16")
    model.weight.grad = torch.full((1, 1), INF)
    assert made.find_nonfinite(Decision(), [torch.tensor(0.5)]) is None


def test_on_a_gpu_a_gradient_is_looked_at_with_the_next_loss_unless_it_is_wanted_now():
    made, model = update(late=True)
    model.weight.grad = torch.full((1, 1), NAN)
    assert made.find_nonfinite(Decision(), [torch.tensor(0.5)]) is None
    decision = vote(made, NAN)  # as it is with weights that took it up
    assert decision.bad_rank == 0
    found = made.find_nonfinite(decision, [torch.tensor(NAN)])
    assert (found.loss, found.gradients, found.steps_ago) == (0.5, ["weight"], 1)
    assert vote(made, 0.25).bad_rank is None
    assert made.find_nonfinite(Decision(), [torch.tensor(0.25)], at_once=True).steps_ago == 0


# -- what is saved ---------------------------------------------------------------------------------------------


def captured(spoil):
    """A state with everything in it, one part of which is spoilt."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2,), -INF))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    ema = Ema(model, 0.9)
    spoil(model, ema.model, optimizer.state)
    schedule, extras = lr_schedules.constant(optimizer, 1), {"ema": ema, "scaler": None}
    state = TrainingState(Parallel().adopt(model), optimizer, schedule, Position(), {}, extras)
    return not_finite(state.begin_capture()(), [name for name, _ in model.named_buffers()])


def test_an_optimizer_with_a_layout_of_its_own_is_not_looked_into():
    weights = {"weight": torch.full((2,), NAN)}
    assert not_finite({"model": {}, "optimizer": {"inner": {"state": [weights]}, "steps": 3, "state": 1}}) == []
    assert not_finite({"model": {}, "optimizer": {"inner": weights, "steps": 3}}) == []


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda model, ema, slots: None, []),
        (lambda model, ema, slots: model[0].weight.data.fill_(1e38), []),  # whose sum is infinite
        (lambda model, ema, slots: model[0].weight.data[0].fill_(NAN), ["0.weight"]),
        (lambda model, ema, slots: model[1].running_var[0].fill_(INF), ["1.running_var"]),
        (lambda model, ema, slots: ema[0].bias[0].fill_(-INF), ["ema: 0.bias"]),
        (
            lambda model, ema, slots: slots[model[0].bias]["exp_avg_sq"].fill_(INF),
            ["exp_avg_sq of 0.bias in the optimizer"],
        ),
        (
            lambda model, ema, slots: slots[model[0].bias].update(kept=[{"last": torch.tensor([NAN])}]),
            ["kept of 0.bias in the optimizer"],
        ),
    ],
)
def test_of_a_state_what_is_not_finite_is_named_but_masks(spoil, found):
    assert captured(spoil) == found
