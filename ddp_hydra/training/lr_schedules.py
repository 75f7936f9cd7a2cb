"""Learning-rate schedules with warm-up, as factors of the optimizer's own rate.

Each takes the optimizer whose rate it sets, the steps of the run, `total_steps`, and of an epoch, `epoch_steps`;
conf/scheduler describes the options.

A step is one of the global batch that the run began with, see `ScheduleProgress`. After a resume with
another global batch, the steps done need not be a whole number, and the rate follows the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_hydra.training.state import Position, each


def own_rate(rate: Any) -> Any:
    # Schedules write into a rate that is a tensor, so it is a tensor of its own at each place, and of no integers.
    if not isinstance(rate, Tensor):
        return rate
    return rate.clone() if rate.is_floating_point() else rate.to(torch.get_default_dtype())


def first_rate(group: Mapping[str, Any]) -> Any:
    # None: the optimizer finds its rate itself.
    return group.get("initial_lr", group.get("lr"))


def keep_first_rates(groups: Iterable[dict[str, Any]]) -> None:
    for group in groups:
        if group.get("lr") is not None:
            group.setdefault("initial_lr", own_rate(group["lr"]))


@torch.no_grad()
def set_rate(group: dict[str, Any], rate: Any) -> None:
    # As torch's schedules do: an optimizer may have compiled its step for this tensor.
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate.squeeze() if isinstance(rate, Tensor) else rate)
    else:
        group["lr"] = rate


class FactorLR:
    """Sets the rate to a factor of the optimizer's own, by the steps done, which need not be a whole number.

    It writes a rate only where its factor changes: with a constant one, an optimizer may adapt the rate itself.

    Attributes:
        written: the factor of the rates that were written last; None has them written in any case.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[float], float]) -> None:
        self.optimizer, self.factor = optimizer, factor
        keep_first_rates(optimizer.param_groups)
        self.base_lrs = [first_rate(group) for group in optimizer.param_groups]
        self.last_epoch = 0.0
        self.written: float | None = None
        self.go_to(0)

    def go_to(self, done: float) -> None:
        self.last_epoch, factor = done, self.factor(done)
        if factor != self.written:
            self.written = factor
            self._write(0)

    def extend(self) -> None:
        """Give the groups that the optimizer has got since the rates of this step."""
        first = len(self.base_lrs)
        added = self.optimizer.param_groups[first:]
        keep_first_rates(added)
        self.base_lrs.extend(map(first_rate, added))
        self._write(first)

    def _write(self, first: int) -> None:
        for group, rate in list(zip(self.optimizer.param_groups, self.get_last_lr(), strict=True))[first:]:
            if rate is not None:
                set_rate(group, rate)

    def step(self) -> None:
        self.go_to(self.last_epoch + 1)

    def get_last_lr(self) -> list[float | None]:
        return [None if base is None else base * self.factor(self.last_epoch) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        rates = [own_rate(group.get("lr")) for group in self.optimizer.param_groups]
        own = {"base_lrs": list(self.base_lrs), "last_epoch": self.last_epoch}
        return {**own, "written": self.written, "rates": rates}  # an optimizer may not save its rates

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base_lrs, self.last_epoch = list(state["base_lrs"]), state["last_epoch"]
        self.written = state["written"]
        for group, rate in zip(self.optimizer.param_groups, state["rates"], strict=False):
            if rate is not None:
                set_rate(group, rate)


def constant(optimizer: Optimizer, total_steps: int, epoch_steps: int = 1, **options: Any) -> FactorLR:
    """Keep the optimizer's rate after the warm-up."""
    return _schedule(optimizer, lambda _, share: 1.0, total_steps, epoch_steps, **options)


def linear(
    optimizer: Optimizer, total_steps: int, epoch_steps: int = 1, min_factor: float = 0.0, **options: Any
) -> FactorLR:
    """Fall in a straight line."""
    return _schedule(optimizer, lambda _, share: 1 - (1 - min_factor) * share, total_steps, epoch_steps, **options)


def cosine(
    optimizer: Optimizer, total_steps: int, epoch_steps: int = 1, min_factor: float = 0.0, **options: Any
) -> FactorLR:
    """Fall along half a cosine (Loshchilov and Hutter, 2017, without restarts)."""
    return _schedule(
        optimizer, lambda _, share: _half_cosine(1.0, min_factor, share), total_steps, epoch_steps, **options
    )


def step(
    optimizer: Optimizer,
    total_steps: int,
    epoch_steps: int = 1,
    milestones: Sequence[float] = (0.5, 0.75),
    gamma: float = 0.1,
    **options: Any,
) -> FactorLR:
    """Multiply by `gamma` at each milestone, a share of the run."""
    limits = [_share("milestones", milestone) * total_steps for milestone in milestones]

    def factor(step: float, share: float) -> float:
        return gamma ** sum(step >= limit for limit in limits)

    return _schedule(optimizer, factor, total_steps, epoch_steps, **options)


def one_cycle(
    optimizer: Optimizer,
    total_steps: int,
    epoch_steps: int = 1,
    rise: float = 0.3,
    first_factor: float = 0.04,
    min_factor: float = 1e-4,
) -> FactorLR:
    """Rise along half a cosine and fall along another (Smith and Topin, 2018); the momentum stays the same.

    The optimizer's own rate is the highest.
    """
    _share("rise", rise)

    def factor(step: float, share: float) -> float:
        if share < rise:
            return _half_cosine(first_factor, 1.0, share / rise)
        return _half_cosine(1.0, min_factor, (share - rise) / (1 - rise) if rise < 1 else 1.0)

    return _schedule(optimizer, factor, total_steps, epoch_steps)


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"scheduler.{name} has {value}: give shares of the run, 0 to 1")
    return value


def _half_cosine(begin: float, end: float, done: float) -> float:
    return end + (begin - end) * 0.5 * (1 + math.cos(math.pi * done))


def _schedule(
    optimizer: Optimizer,
    factor: Callable[[float, float], float],
    total_steps: int,
    epoch_steps: int,
    warmup_steps: int = 0,
    warmup_epochs: float = 0.0,
    by: str = "step",
) -> FactorLR:
    if by not in ("step", "epoch"):
        raise ValueError(f"by={by!r}: give scheduler.by=step or scheduler.by=epoch")
    if warmup_steps < 0 or warmup_epochs < 0:
        given = f"scheduler.warmup_steps={warmup_steps}, scheduler.warmup_epochs={warmup_epochs}"
        raise ValueError(f"{given}: give 0 or more")
    warmup = warmup_steps + round(warmup_epochs * epoch_steps)
    length = max(1, total_steps - warmup)

    def with_warmup(step: float) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if by == "epoch":
            step = step // epoch_steps * epoch_steps
        return factor(step, min(1.0, max(0, step - warmup) / length))

    return FactorLR(optimizer, with_warmup)


class ScheduleProgress:
    """Counts how far a run is, in steps of the global batch that it began with.

    After a resume with another global batch, a step of the run is more or less than one of these steps. A schedule
    that counts these steps follows the same curve, and ends when the run ends.

    Attributes:
        global_batch: samples in a step, when the run began.
        epoch_steps: steps in an epoch, when the run began; 0 if they are not known. Then only max_steps counts.
        taken: steps that a scheduler of torch has taken.
    """

    def __init__(self, epochs: int | None, max_steps: int | None, sampler: Any, position: Position) -> None:
        length = steps_in_epoch(sampler)
        self.epochs = epochs if length is not None else None
        self.max_steps, self.sampler, self.position = max_steps, sampler, position
        self.global_batch: int = sampler.global_batch
        self.epoch_steps = length or 0
        self.taken = 0

    @property
    def total(self) -> int:
        return min(length for _, length in self._limits())

    @property
    def done(self) -> float:
        # A run that epochs limit is measured by its samples; a run that max_steps limits, by its steps, however large
        # they are. If both limit it, the one that is nearer to its end counts.
        total = self.total
        done = max(count * total / length for count, length in self._limits())
        return int(done) if done == int(done) else done

    def _limits(self) -> Iterator[tuple[float, int]]:
        if self.epochs:
            began, now = self.epoch_steps * self.global_batch, planned_steps(self.sampler) * self.sampler.global_batch
            passed = self.position.offset * self.epoch_steps / max(began, now)
            yield self.position.epoch * self.epoch_steps + passed, self.epochs * self.epoch_steps
        if self.max_steps:
            yield self.position.step, self.max_steps

    def move(self, scheduler: Any) -> None:
        # Torch's own schedulers take whole steps only, so they round down.
        parts = [part for _, part in each(scheduler)]
        for part in parts:
            if isinstance(part, FactorLR):
                part.go_to(self.done)
        torchs = [part for part in parts if not isinstance(part, (FactorLR, ReduceLROnPlateau))]
        while torchs and self.taken < int(self.done):
            self.taken += 1
            for part in torchs:
                part.step()

    @staticmethod
    def judge(scheduler: Any, value: float | None) -> None:
        for _, part in each(scheduler):
            if isinstance(part, ReduceLROnPlateau) and value is not None:
                part.step(value)

    def state_dict(self) -> dict[str, int]:
        counts = {"global_batch": self.global_batch, "epoch_steps": self.epoch_steps, "taken": self.taken}
        return {**counts, "total": self.total}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.global_batch = int(state["global_batch"])
        self.epoch_steps = int(state["epoch_steps"]) or self.epoch_steps
        self.taken = int(state["taken"])


def steps_in_epoch(sampler: Any) -> int | None:
    length = planned_steps(sampler)
    return int(length) if length < math.inf else None


def planned_steps(sampler: Any, position: int = 0) -> float:
    return float(sampler.planned(position) if hasattr(sampler, "planned") else sampler.steps(position))
