from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra import schedules


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
        (schedules.constant, 3, {}, [1, 1, 1]),
        (schedules.constant, 4, {"warmup_steps": 3}, [0.25, 0.5, 0.75, 1]),
        (schedules.cosine, 4, {}, [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2]),
        (schedules.cosine, 4, {"min_factor": 0.5}, [1, 0.5 + (1 + HALF) / 4, 0.75, 0.5 + (1 - HALF) / 4]),
        (schedules.cosine, 3, {"warmup_steps": 1}, [0.5, 1, 0.5]),
        (schedules.step, 8, {}, [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
        (schedules.step, 4, {"milestones": [0.25], "gamma": 0.5}, [1, 0.5, 0.5, 0.5]),
        (schedules.step, 4, {"milestones": []}, [1, 1, 1, 1]),
        (schedules.step, 4, {"milestones": [0.5], "warmup_steps": 1}, [0.5, 1, 0.1, 0.1]),
        (schedules.linear, 4, {}, [1, 0.75, 0.5, 0.25]),
        (schedules.linear, 3, {"min_factor": 0.5, "warmup_steps": 1}, [0.5, 1, 0.75]),
        (schedules.one_cycle, 4, {"rise": 0.5, "first_factor": 0.2, "min_factor": 0.1}, [0.2, 0.6, 1, 0.55]),
        (schedules.one_cycle, 2, {"rise": 1.0, "first_factor": 0.0}, [0, 0.5]),
        (schedules.constant, 4, {"warmup_epochs": 1.5, "epoch_steps": 2}, [0.25, 0.5, 0.75, 1]),
        (schedules.constant, 4, {"warmup_steps": 1, "warmup_epochs": 1, "epoch_steps": 2}, [0.25, 0.5, 0.75, 1]),
        (schedules.linear, 6, {"by": "epoch", "epoch_steps": 2}, [1, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3]),
        (schedules.step, 4, {"by": "epoch", "epoch_steps": 2, "milestones": [0.25]}, [1, 1, 0.1, 0.1]),
    ],
)
def test_rates_step_by_step(schedule, total_steps, options, expected):
    assert rates(schedule, total_steps, **options) == pytest.approx(expected)


@pytest.mark.parametrize("min_factor", [0.0, 0.1])
def test_cosine_ends_at_its_least_factor_and_stays_there(min_factor):
    assert rates(schedules.cosine, 10, 15, min_factor=min_factor)[10:] == pytest.approx([min_factor] * 5)


FALLING = [schedules.constant, schedules.cosine, schedules.linear, schedules.step]


@given(st.sampled_from(FALLING), st.integers(1, 20), st.integers(0, 30))
def test_a_rate_rises_during_warm_up_then_never(schedule, total_steps, warmup_steps):
    taken = rates(schedule, total_steps, total_steps + warmup_steps + 2, warmup_steps=warmup_steps)
    rise, rest = taken[:warmup_steps], taken[warmup_steps:]
    assert rise == sorted(rise)
    assert rest == sorted(rest, reverse=True)
    assert all(0 <= rate <= 1 for rate in taken)
    assert taken[0] > 0  # the first step already moves


def test_other_steps_than_steps_and_epochs_are_refused():
    with pytest.raises(ValueError, match=r"by is 'week', and is step or epoch: type scheduler\.by=epoch"):
        rates(schedules.cosine, 4, by="week")


def test_each_group_keeps_its_own_rate():
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    scheduler = schedules.cosine(optimizer, 2)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.5, 0.05])
