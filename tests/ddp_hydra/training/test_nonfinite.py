from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from ddp_hydra.errors import NonFiniteLoss
from ddp_hydra.training import lr_schedules, nonfinite
from ddp_hydra.training.nonfinite import NAMED, SHOWN, NonFiniteHandler, NonFiniteStep
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.state import Position, TrainingState

NAN = float("nan")
BAD = NonFiniteStep(0, NAN)


def state(optimizer=torch.optim.Adam, **options) -> TrainingState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    made = optimizer(model.parameters(), **options)
    return TrainingState(Parallel().adopt(model), made, lr_schedules.cosine(made, 50), Position(), {})


def step(run: TrainingState, bad: bool = False) -> torch.Tensor:
    """Forward and backward, as the loop does before it hears the decision."""
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(run.position.step))
    loss = run.model(x * NAN if bad else x).pow(2).sum()
    run.optimizer.zero_grad()
    loss.backward()
    return loss


def advance(run: TrainingState, optimizer_step: bool = True) -> None:
    if optimizer_step:
        run.optimizer.step()
    run.scheduler.step()
    run.position.advance(4)


def train(run: TrainingState, steps: int) -> TrainingState:
    for _ in range(steps):
        step(run)
        advance(run)
    return run


def weights(run: TrainingState) -> list[torch.Tensor]:
    kept = [tensor.clone() for tensor in run.model.state_dict().values()]
    return kept + [value.clone() for slots in run.optimizer.state.values() for value in slots.values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- abort -------------------------------------------------------------------------------------------------


def test_abort_names_the_samples_on_the_rank_that_had_them(sent):
    guard = NonFiniteHandler("abort", 10, train(state(), 6))
    with pytest.raises(NonFiniteLoss) as caught:
        guard.handle(NonFiniteStep(1, NAN), rank=1, samples=[4, 8, 15])
    assert str(caught.value).startswith("the loss is nan in step 7; samples of this rank: 4, 8, 15. Lower optimizer.lr")
    assert "trainer.on_nonfinite=skip or rollback" in str(caught.value)
    assert not caught.value.consequence


def test_abort_says_on_other_ranks_whose_loss_it_was(sent):
    with pytest.raises(NonFiniteLoss, match=r"^rank 2 found a loss that is not finite in step 1$") as caught:
        NonFiniteHandler("abort", 10, state()).handle(NonFiniteStep(2, 1.0), rank=0, samples=[1])
    assert caught.value.consequence


def test_of_many_samples_the_message_shows_some_and_the_record_all(sent):
    samples = list(range(1000, 1000 + 3 * SHOWN))
    with pytest.raises(NonFiniteLoss) as caught:
        NonFiniteHandler("abort", 10, state()).handle(BAD, 0, samples)
    assert f", {samples[SHOWN - 1]} … ({3 * SHOWN})" in str(caught.value)
    assert str(samples[SHOWN]) not in str(caught.value)
    assert json.loads(sent[0].data.text)["samples"] == samples


# -- skip --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_that_is_left_out_leaves_weights_and_statistics_as_they_were(policy, sent):
    run = train(state(), 3)
    guard = NonFiniteHandler(policy, 10, run)
    run.nonfinite.append(4)  # a rollback has been there before
    before = weights(run)
    guard.before_step()
    step(run, bad=True)
    assert not same(before, weights(run))  # BatchNorm has taken it up
    assert guard.handle(BAD, 0, [1]) is False
    assert same(before, weights(run))
    advance(run, optimizer_step=False)
    train(run, 2)
    assert all(value.isfinite().all() for value in weights(run))


def test_after_a_good_step_its_statistics_stay():
    run = train(state(), 1)
    guard = NonFiniteHandler("skip", 10, run)
    guard.before_step()
    step(run)
    advance(run)
    after = weights(run)
    guard.before_step()
    assert same(after, weights(run))
    step(run, bad=True)
    guard.buffers.put_back()
    assert same(after, weights(run))


# -- rollback ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}], ids=["adam", "sgd"]
)
def test_a_rollback_goes_back_to_where_it_was_kept_bit_for_bit_and_more_than_once(options, sent):
    run = train(state(**options), 2)
    guard = NonFiniteHandler("rollback", 10, run)
    guard.remember()
    kept, rate = weights(run), run.scheduler.get_last_lr()
    for later in (3, 1, 4):
        train(run, later)
        step(run, bad=True)
        assert guard.handle(BAD, 0, [1]) is True
        assert same(kept, weights(run))
        assert run.position == Position(2, 0, 8, 8)
        assert run.scheduler.get_last_lr() == rate
        back, text = sent
        assert (back.kind, back.step) == ("rolledback", 2), "what is told of the step comes behind"
        assert (text.data.name, text.step) == ("nonfinite", 3 + later)
        sent.clear()


def test_a_rollback_goes_to_the_last_place_that_was_kept(sent):
    run = state()
    guard = NonFiniteHandler("rollback", 10, run)
    run.position.end_epoch()
    train(run, 2)
    run.best, run.validation_due = 0.5, False
    guard.remember()
    kept = weights(run)
    train(run, 3)
    run.position.end_epoch()
    run.best = 0.9
    assert guard.handle(BAD, 0, [1]) is True
    assert same(kept, weights(run))
    assert (run.position, run.best, run.validation_due) == (Position(2, 1, 8, 8), 0.5, False)


def test_a_step_that_is_bad_again_after_a_rollback_is_left_out_and_counts_once(sent):
    run = state()
    guard = NonFiniteHandler("rollback", 1, run)
    guard.remember()
    train(run, 2)
    assert guard.handle(BAD, 0, [1]) is True
    train(run, 2)
    assert guard.handle(BAD, 0, [1]) is False
    assert (run.position.step, run.nonfinite) == (2, [3])
    advance(run, optimizer_step=False)
    with pytest.raises(NonFiniteLoss, match="in step 4, and 1 such steps were allowed"):
        guard.handle(BAD, 0, [1])


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_steps_before_a_resume_count(policy, sent):
    run = train(state(), 2)
    guard = NonFiniteHandler(policy, 2, run)
    guard.remember()
    guard.before_step()
    step(run, bad=True)
    guard.handle(BAD, 0, [1])
    again = state()
    again.restore(run.begin_capture()())
    assert again.nonfinite == [3]
    guard = NonFiniteHandler(policy, 2, train(again, 1))
    guard.remember()
    train(again, 1)
    guard.handle(BAD, 0, [1])
    train(again, 3)
    with pytest.raises(NonFiniteLoss, match="and 2 such steps were allowed"):
        guard.handle(BAD, 0, [1])


# -- what is told ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [NAN, math.inf, -math.inf])
def test_the_rank_that_had_it_records_its_samples(loss, sent, capsys):
    nonfinite.record(5, NonFiniteStep(1, loss), rank=3, samples=torch.tensor([3, 4]))
    (record,) = sent
    assert (record.kind, record.step, record.data.name) == ("text", 5, "nonfinite")
    assert json.loads(record.data.text) == {"step": 5, "rank": 3, "loss": str(loss), "samples": [3, 4]}
    assert capsys.readouterr().out.startswith("loss not finite: {")


@pytest.mark.parametrize(("rank", "said"), [(0, "loss or gradient not finite on rank 2 in step 5\n"), (1, "")])
def test_ranks_whose_loss_was_good_record_nothing_and_rank_0_says_whose_it_was(rank, said, sent, capsys):
    nonfinite.record(5, NonFiniteStep(2, 0.5), rank=rank, samples=[1])
    assert (sent, capsys.readouterr().out) == ([], said)


@pytest.mark.parametrize(("rank", "loss"), [(0, 0.3), (2, 0.7)])
def test_of_a_bad_gradient_each_rank_records_its_samples_and_the_first_names_the_parameters(rank, loss, sent):
    names = [f"layer.{number}" for number in range(NAMED + 2)]
    with pytest.raises(NonFiniteLoss) as caught:
        NonFiniteHandler("abort", 10, train(state(), 6)).handle(
            NonFiniteStep(0, loss, names, steps_ago=1), rank, [4, 8]
        )
    (record,) = sent
    assert json.loads(record.data.text) == {
        "step": 6, "rank": rank, "loss": str(loss), "samples": [4, 8], "gradients": names
    }  # fmt: skip
    assert caught.value.consequence == (rank != 0)
    said = (
        "the gradient of layer.0, layer.1, layer.2, layer.3, layer.4, layer.5 … (8) is not finite in step 6, although "
    )
    said += "the loss is 0.3; samples of this rank: 4, 8. Lower optimizer.lr"
    assert str(caught.value).startswith("rank 0 found a gradient that is not finite in step 6" if rank else said)


def test_a_rollback_never_goes_to_what_is_not_finite(sent):
    run = train(state(), 2)
    guard = NonFiniteHandler("rollback", 10, run)
    run.model[0].weight.data[0, 0] = NAN
    guard.remember()
    with pytest.raises(NonFiniteLoss, match=r"the state after step 2 is not finite \(0\.weight\)"):
        guard.handle(BAD, 0, [1])
