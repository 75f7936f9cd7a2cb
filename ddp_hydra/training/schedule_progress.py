"""Tells learning-rate schedules how much of the run is done."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_hydra.training.lr_schedules import FactorLR
from ddp_hydra.training.state import Position, each


class ScheduleProgress:
    """Counts how far a run is, in steps of the global batch that it began with.

    After a resume with another global batch, a step of the run is more or less than one of these steps. A schedule
    that counts these steps follows the same curve, and ends when the run ends.

    Args:
        epochs: of the run; None if only max_steps limits it.
        max_steps: optimizer steps of the run; None if only epochs limit it.
        sampler: the training sampler.
        position: of the run; the loop moves it.

    Attributes:
        global_batch: samples in a step, when the run began.
        epoch_steps: steps in an epoch, when the run began; 0 if nobody knows them. Then only max_steps counts.
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
        """The number of steps of the whole run."""
        return min(length for _, length in self._limits())

    @property
    def done(self) -> float:
        """The steps done: a whole number as long as the global batch stays the same.

        A run that epochs limit is measured by its samples; a run that max_steps limits, by its steps, however large
        they are. If both limit it, the one that is nearer to its end counts.
        """
        total = self.total
        done = max(count * total / length for count, length in self._limits())
        return int(done) if done == int(done) else done

    def _limits(self) -> Iterator[tuple[float, int]]:
        """Yield (done, length) of each limit of the run, in steps."""
        if self.epochs:
            began, now = self.epoch_steps * self.global_batch, planned_steps(self.sampler) * self.sampler.global_batch
            passed = self.position.offset * self.epoch_steps / max(began, now)
            yield self.position.epoch * self.epoch_steps + passed, self.epochs * self.epoch_steps
        if self.max_steps:
            yield self.position.step, self.max_steps

    def move(self, scheduler: Any) -> None:
        """Move a scheduler to the run's position. torch's own schedulers take whole steps only, so they round down.

        Args:
            scheduler: one, or several by name.
        """
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
        """Tell each ReduceLROnPlateau the value of the objective, after a validation.

        Args:
            scheduler: one, or several by name.
            value: None if it was not measured.
        """
        for _, part in each(scheduler):
            if isinstance(part, ReduceLROnPlateau) and value is not None:
                part.step(value)

    def state_dict(self) -> dict[str, int]:
        """Return the counts for a checkpoint."""
        counts = {"global_batch": self.global_batch, "epoch_steps": self.epoch_steps, "taken": self.taken}
        return {**counts, "total": self.total}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counts of a checkpoint."""
        self.global_batch = int(state["global_batch"])
        self.epoch_steps = int(state["epoch_steps"]) or self.epoch_steps
        self.taken = int(state["taken"])


def steps_in_epoch(sampler: Any) -> int | None:
    """Return how many steps an epoch has; None if nobody knows."""
    length = planned_steps(sampler)
    return int(length) if length < math.inf else None


def planned_steps(sampler: Any, position: int = 0) -> float:
    """Return how many steps of an epoch are left, as far as is known; infinity if nobody knows.

    Args:
        sampler: the training sampler; that of an iterable data set can't know when the data ends.
        position: samples of the epoch that all ranks have seen.
    """
    return float(sampler.planned(position) if hasattr(sampler, "planned") else sampler.steps(position))
