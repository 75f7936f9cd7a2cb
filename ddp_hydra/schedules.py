"""Learning-rate schedules with warm-up, as factors of the optimizer's own rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def constant(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0) -> LambdaLR:
    """Stay at the optimizer's rate after the warm-up."""
    return LambdaLR(optimizer, warmed_up(lambda step: 1.0, warmup_steps))


def cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, min_factor: float = 0.0) -> LambdaLR:
    """Fall along half a cosine (Loshchilov and Hutter, 2017, without restarts).

    Args:
        optimizer: whose rate to schedule.
        total_steps: steps of the whole run.
        warmup_steps: steps of linear rise from 0 before that.
        min_factor: factor at the last step.
    """
    length = max(1, total_steps - warmup_steps)

    def factor(step: int) -> float:
        done = min(1.0, (step - warmup_steps) / length)
        return min_factor + (1 - min_factor) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, warmed_up(factor, warmup_steps))


def step(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int = 0,
    milestones: Sequence[float] = (0.5, 0.75),
    gamma: float = 0.1,
) -> LambdaLR:
    """Multiply by `gamma` at each milestone.

    Args:
        optimizer: whose rate to schedule.
        total_steps: steps of the whole run.
        warmup_steps: steps of linear rise from 0 before that.
        milestones: fractions of the run, 0 to 1.
        gamma: the factor.
    """
    limits = [milestone * total_steps for milestone in milestones]
    return LambdaLR(optimizer, warmed_up(lambda step: gamma ** sum(step >= limit for limit in limits), warmup_steps))


def warmed_up(factor: Callable[[int], float], warmup_steps: int) -> Callable[[int], float]:
    """Put a linear rise in front of a schedule; the first step already moves."""
    return lambda step: (step + 1) / (warmup_steps + 1) if step < warmup_steps else factor(step)
