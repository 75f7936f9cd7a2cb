from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.training import lr_schedules
from ddp_hydra.training.lr_schedules import ScheduleProgress
from ddp_hydra.training.state import Position, together


def rates(schedule, total_steps, steps=None, **options):
    """The rate that each step is taken with, for an optimizer of rate 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = schedule(optimizer, total_steps, **options)
    taken = []
    for _ in range(total_steps if steps is None else steps):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return taken


HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("schedule", "total_steps", "options", "expected"),
    [
        (lr_schedules.constant, 3, {}, [1, 1, 1]),
        (lr_schedules.constant, 4, {"warmup_steps": 3}, [0.25, 0.5, 0.75, 1]),
        (lr_schedules.cosine, 4, {}, [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2]),
        (lr_schedules.cosine, 4, {"min_factor": 0.5}, [1, 0.5 + (1 + HALF) / 4, 0.75, 0.5 + (1 - HALF) / 4]),
        (lr_schedules.cosine, 3, {"warmup_steps": 1}, [0.5, 1, 0.5]),
        (lr_schedules.step, 8, {}, [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
        (lr_schedules.step, 4, {"milestones": [0.25], "gamma": 0.5}, [1, 0.5, 0.5, 0.5]),
        (lr_schedules.step, 4, {"milestones": []}, [1, 1, 1, 1]),
        (lr_schedules.step, 4, {"milestones": [0.5], "warmup_steps": 1}, [0.5, 1, 0.1, 0.1]),
        (lr_schedules.linear, 4, {}, [1, 0.75, 0.5, 0.25]),
        (lr_schedules.linear, 3, {"min_factor": 0.5, "warmup_steps": 1}, [0.5, 1, 0.75]),
        (lr_schedules.one_cycle, 4, {"rise": 0.5, "first_factor": 0.2, "min_factor": 0.1}, [0.2, 0.6, 1, 0.55]),
        (lr_schedules.one_cycle, 2, {"rise": 1.0, "first_factor": 0.0}, [0, 0.5]),
        (lr_schedules.constant, 4, {"warmup_epochs": 1.5, "epoch_steps": 2}, [0.25, 0.5, 0.75, 1]),
        (lr_schedules.constant, 4, {"warmup_steps": 1, "warmup_epochs": 1, "epoch_steps": 2}, [0.25, 0.5, 0.75, 1]),
        (lr_schedules.linear, 6, {"by": "epoch", "epoch_steps": 2}, [1, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3]),
        (lr_schedules.step, 4, {"by": "epoch", "epoch_steps": 2, "milestones": [0.25]}, [1, 1, 0.1, 0.1]),
    ],
)
def test_rates_step_by_step(schedule, total_steps, options, expected):
    assert rates(schedule, total_steps, **options) == pytest.approx(expected)


@pytest.mark.parametrize("min_factor", [0.0, 0.1])
def test_cosine_ends_at_its_least_factor_and_stays_there(min_factor):
    assert rates(lr_schedules.cosine, 10, 15, min_factor=min_factor)[10:] == pytest.approx([min_factor] * 5)


FALLING = [lr_schedules.constant, lr_schedules.cosine, lr_schedules.linear, lr_schedules.step]


@given(st.sampled_from(FALLING), st.integers(1, 20), st.integers(0, 30))
def test_a_rate_rises_during_warm_up_then_never(schedule, total_steps, warmup_steps):
    taken = rates(schedule, total_steps, total_steps + warmup_steps + 2, warmup_steps=warmup_steps)
    rise, rest = taken[:warmup_steps], taken[warmup_steps:]
    assert rise == sorted(rise)
    assert rest == sorted(rest, reverse=True)
    assert all(0 <= rate <= 1 for rate in taken)
    assert taken[0] > 0  # the first step already moves


def test_other_steps_than_steps_and_epochs_are_refused():
    with pytest.raises(ValueError, match=r"by='week': give scheduler\.by=step or scheduler\.by=epoch"):
        rates(lr_schedules.cosine, 4, by="week")


@pytest.mark.parametrize(
    ("schedule", "options", "said"),
    [
        ("step", {"milestones": [5, 10]}, r"scheduler\.milestones has 5: give shares of the run, 0 to 1"),
        ("one_cycle", {"rise": 30}, r"scheduler\.rise has 30"),
        ("cosine", {"warmup_steps": -2}, r"^scheduler\.warmup_steps=-2, .*give 0 or more"),
        ("linear", {"warmup_epochs": -0.5}, r"give 0 or more"),
    ],
)
def test_numbers_that_can_not_be_meant_are_refused(schedule, options, said):
    with pytest.raises(ValueError, match=said):
        rates(getattr(lr_schedules, schedule), 4, **options)


def test_a_rate_that_is_a_tensor_stays_that_tensor_and_the_first_one_is_another():
    groups = [{"params": [torch.zeros(1, requires_grad=True)]}, {"params": [torch.zeros(1, requires_grad=True)]}]
    by_tensor = torch.optim.SGD(groups, lr=torch.tensor(0.5))
    kept = by_tensor.param_groups[1]["lr"] = by_tensor.param_groups[1]["lr"].clone()
    schedule = lr_schedules.linear(by_tensor, 4)
    for wanted in (0.5, 0.375, 0.25):
        assert [float(group["lr"]) for group in by_tensor.param_groups] == [wanted] * 2
        schedule.step()
    assert by_tensor.param_groups[1]["lr"] is kept
    assert [float(group["initial_lr"]) for group in by_tensor.param_groups] == [0.5] * 2


def test_each_group_keeps_its_own_rate():
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    scheduler = lr_schedules.cosine(optimizer, 2)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.5, 0.05])


# -- as long as the global batch stays, nothing is different from counting steps ---------------------------


def wave(begin, end, done):
    return end + (begin - end) * 0.5 * (1 + math.cos(math.pi * done))


def cycle(done, rise=0.3, first=0.04, last=1e-4):
    return wave(first, 1.0, done / rise) if done < rise else wave(1.0, last, (done - rise) / (1 - rise))


CURVES = {
    "constant": (lr_schedules.constant, lambda done: 1.0),
    "linear": (lr_schedules.linear, lambda done: 1 - (1 - 0.0) * done),
    "cosine": (lr_schedules.cosine, lambda done: wave(1.0, 0.0, done)),
    "one_cycle": (lr_schedules.one_cycle, cycle),
    "step": (lr_schedules.step, None),
}


def by_step(curve, step, total, epoch_steps, warmup_steps=0, warmup_epochs=0.0, by="step"):
    """The factor of a step, counted from 0, as all versions have it."""
    warmup, stride = warmup_steps + round(warmup_epochs * epoch_steps), epoch_steps if by == "epoch" else 1
    if step < warmup:
        return (step + 1) / (warmup + 1)
    step = step // stride * stride
    if curve is None:
        return 0.1 ** sum(step >= limit for limit in (0.5 * total, 0.75 * total))
    return curve(min(1.0, max(0, step - warmup) / max(1, total - warmup)))


def advance(progress):
    """One step, as the loop does it."""
    position = progress.position
    position.advance(progress.sampler.global_batch)
    if progress.sampler.steps(position.offset) == 0:
        position.end_epoch()


LENGTHS = [(3, None), (None, 31), (4, 30), (2, 1000)]


@pytest.mark.medium
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("epochs", "max_steps"), LENGTHS)
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in CURVES]
    + [(name, {"warmup_steps": 5}) for name in CURVES if name != "one_cycle"]
    + [(name, {"warmup_epochs": 0.7, "by": "epoch"}) for name in CURVES if name != "one_cycle"],
)
def test_rates_are_to_the_bit_what_they_are_by_step(name, options, epochs, max_steps, drop_last):
    schedule, curve = CURVES[name]
    sampler = Distributed(103, 7, world_size=1, drop_last=drop_last)
    progress = ScheduleProgress(epochs, max_steps, sampler, Position())
    total = min(epochs * len(sampler) if epochs else 10**6, max_steps or 10**6)
    assert progress.total == total
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = schedule(optimizer, progress.total, epoch_steps=progress.epoch_steps, **options)
    for step in range(total):
        progress.move(scheduler)
        assert optimizer.param_groups[0]["lr"] == 0.3 * by_step(curve, step, total, len(sampler), **options)
        advance(progress)
    assert (progress.done, progress.position.step) == (total, total)


# -- with another global batch -----------------------------------------------------------------------------


def resized(progress, batch_size):
    """The same run, gone on with another batch size."""
    sampler, position = Distributed(progress.sampler.n_samples, batch_size), Position(**vars(progress.position))
    other = ScheduleProgress(progress.epochs, progress.max_steps, sampler, position)
    other.load_state_dict(progress.state_dict())
    return other


def begun(steps, batch_size, **length):
    """A run that has made some steps."""
    made = ScheduleProgress(length.get("epochs"), length.get("max_steps"), Distributed(96, batch_size), Position())
    for _ in range(steps):
        advance(made)
    return made


def rate_at(progress, **options):
    """What a cosine of rate 1 is there."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    progress.move(lr_schedules.cosine(optimizer, progress.total, epoch_steps=progress.epoch_steps, **options))
    return optimizer.param_groups[0]["lr"]


@pytest.mark.medium
@pytest.mark.parametrize(("options", "warmup"), [({}, 0), ({"warmup_steps": 6}, 6), ({"warmup_epochs": 1.25}, 1.25)])
@pytest.mark.parametrize("steps", [0, 3, 5, 8])
@pytest.mark.parametrize(("first", "then"), [(12, 24), (24, 12), (24, 6), (12, 8), (12, 40)])
def test_with_another_global_batch_the_curve_over_the_samples_is_the_same(first, then, steps, options, warmup):
    run = begun(steps, first, epochs=4)
    rise = round(warmup * 96 / first) if "warmup_epochs" in options else warmup
    now = resized(run, then)
    assert rate_at(now, **options) == rate_at(run, **options)
    while now.position.epoch < 4:
        done = (now.position.epoch * 96 + now.position.offset) / first
        expected = (done + 1) / (rise + 1) if done < rise else wave(1, 0, (done - rise) / (4 * 96 / first - rise))
        assert rate_at(now, **options) == pytest.approx(expected, abs=1e-9)
        advance(now)
    assert rate_at(now, **options) == pytest.approx(0, abs=1e-9)


def test_a_run_of_so_many_steps_goes_by_steps_however_large_they_are():
    run = begun(5, 12, max_steps=20)
    now = resized(run, 48)
    for step in range(5, 20):
        assert rate_at(now) == wave(1, 0, step / 20)
        advance(now)


def test_where_epochs_and_steps_limit_a_run_the_nearer_end_counts_and_nothing_jumps():
    """20 steps of at most 32; once they are four times as large, the epochs end first."""
    now = resized(begun(10, 12, epochs=4, max_steps=20), 48)
    assert rate_at(now) == wave(1, 0, 0.5)
    before = 1.0
    while now.position.epoch < 4:
        assert rate_at(now) < before
        before = rate_at(now)
        advance(now)
    assert now.position.step < 20
    assert rate_at(now) == 0


def test_a_second_change_still_goes_by_the_first_batch():
    now = resized(resized(begun(3, 12, epochs=4), 24), 6)
    assert (now.total, now.done, now.global_batch) == (32, 3, 12)


@pytest.mark.parametrize(("then", "taken"), [(24, [6, 8, 10]), (6, [4.5, 5, 5.5])])
def test_one_of_torchs_takes_a_step_for_each_that_the_run_would_have_taken(then, taken):
    run, optimizer = begun(4, 12, epochs=4), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=run.total)
    optimizer.step()
    run.move(scheduler)
    assert scheduler.last_epoch == 4
    now = resized(run, then)
    for done in taken:
        advance(now)
        now.move(scheduler)
        assert (now.done, scheduler.last_epoch) == (done, int(done))


@pytest.mark.parametrize("ours_first", [True, False])
def test_schedules_of_several_updates_may_be_of_both_kinds(ours_first):
    run, optimizer = begun(4, 12, epochs=4), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    ours = lr_schedules.cosine(torch.optim.SGD([torch.zeros(1)], lr=1.0), run.total)
    torchs = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    named = [("a", ours), ("b", torchs)]
    for _ in range(2):
        run.move(together(dict(named if ours_first else reversed(named))))
        assert (ours.last_epoch, torchs.last_epoch) == (run.done, run.done)
        advance(run)
