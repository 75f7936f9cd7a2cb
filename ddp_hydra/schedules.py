"""Learning-rate schedules with warm-up, as factors of the optimizer's own rate.

All take `total_steps`, the steps of the run, and `epoch_steps`, those of an epoch. The warm-up is a linear rise at the
beginning, of `warmup_steps` and `warmup_epochs` together; with `by="epoch"` the rate stays the same within an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Factor = Callable[[float], float]
"""From the share of the run behind the warm-up that is done, 0..1, to a factor of the rate."""


def constant(optimizer: Optimizer, total_steps: int, epoch_steps: int = 1, **options: Any) -> LambdaLR:
    """Stay at the optimizer's rate after the warm-up.

    Args:
        optimizer: whose rate to schedule.
        total_steps: see above.
        epoch_steps: see above.
        options: warmup_steps, warmup_epochs, by.
    """
    return _scheduled(optimizer, lambda done: 1.0, total_steps, epoch_steps, **options)


def linear(
    optimizer: Optimizer, total_steps: int, epoch_steps: int = 1, min_factor: float = 0.0, **options: Any
) -> LambdaLR:
    """Fall in a straight line.

    Args:
        optimizer: whose rate to schedule.
        total_steps: see above.
        epoch_steps: see above.
        min_factor: factor at the last step.
        options: warmup_steps, warmup_epochs, by.
    """
    return _scheduled(optimizer, lambda done: 1 - (1 - min_factor) * done, total_steps, epoch_steps, **options)


def cosine(
    optimizer: Optimizer, total_steps: int, epoch_steps: int = 1, min_factor: float = 0.0, **options: Any
) -> LambdaLR:
    """Fall along half a cosine (Loshchilov and Hutter, 2017, without restarts).

    Args:
        optimizer: whose rate to schedule.
        total_steps: see above.
        epoch_steps: see above.
        min_factor: factor at the last step.
        options: warmup_steps, warmup_epochs, by.
    """
    return _scheduled(optimizer, lambda done: _wave(1.0, min_factor, done), total_steps, epoch_steps, **options)


def step(
    optimizer: Optimizer,
    total_steps: int,
    epoch_steps: int = 1,
    milestones: Sequence[float] = (0.5, 0.75),
    gamma: float = 0.1,
    **options: Any,
) -> LambdaLR:
    """Multiply by `gamma` at each milestone.

    Args:
        optimizer: whose rate to schedule.
        total_steps: see above.
        epoch_steps: see above.
        milestones: fractions of the run, 0 to 1.
        gamma: the factor.
        options: warmup_steps, warmup_epochs, by.
    """
    limits = [milestone * total_steps for milestone in milestones]
    return _by_step(
        optimizer, lambda step: gamma ** sum(step >= limit for limit in limits), total_steps, epoch_steps, **options
    )


def one_cycle(
    optimizer: Optimizer,
    total_steps: int,
    epoch_steps: int = 1,
    rise: float = 0.3,
    first_factor: float = 0.04,
    min_factor: float = 1e-4,
) -> LambdaLR:
    """Rise along half a cosine, and fall along another (Smith and Topin, 2018; the momentum stays).

    Args:
        optimizer: whose rate to schedule; its own is the highest.
        total_steps: see above.
        epoch_steps: see above.
        rise: share of the run in which it rises, 0..1.
        first_factor: factor at the first step.
        min_factor: factor at the last step.
    """

    def factor(done: float) -> float:
        if done < rise:
            return _wave(first_factor, 1.0, done / rise)
        return _wave(1.0, min_factor, (done - rise) / (1 - rise) if rise < 1 else 1.0)

    return _scheduled(optimizer, factor, total_steps, epoch_steps)


def _wave(begin: float, end: float, done: float) -> float:
    return end + (begin - end) * 0.5 * (1 + math.cos(math.pi * done))


def _scheduled(
    optimizer: Optimizer,
    factor: Factor,
    total_steps: int,
    epoch_steps: int,
    warmup_steps: int = 0,
    warmup_epochs: float = 0.0,
    by: str = "step",
) -> LambdaLR:
    """Schedule by the share of the run behind the warm-up."""
    warmup = warmup_steps + round(warmup_epochs * epoch_steps)
    length = max(1, total_steps - warmup)
    done: Callable[[int], float] = lambda step: min(1.0, max(0, step - warmup) / length)  # noqa: E731
    return _by_step(optimizer, lambda step: factor(done(step)), total_steps, epoch_steps, warmup, by=by)


def _by_step(
    optimizer: Optimizer,
    factor: Callable[[int], float],
    total_steps: int,
    epoch_steps: int,
    warmup_steps: int = 0,
    warmup_epochs: float = 0.0,
    by: str = "step",
) -> LambdaLR:
    """Schedule by the step, with a linear rise in front; the first step already moves."""
    if by not in ("step", "epoch"):
        raise ValueError(f"by is {by!r}, and is step or epoch: type scheduler.by=epoch")
    warmup, stride = warmup_steps + round(warmup_epochs * epoch_steps), epoch_steps if by == "epoch" else 1
    return LambdaLR(
        optimizer, lambda step: (step + 1) / (warmup + 1) if step < warmup else factor(step // stride * stride)
    )
