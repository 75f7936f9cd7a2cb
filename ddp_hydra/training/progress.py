"""How much of a run is done: what learning-rate schedules go by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddp_hydra.training.checkpoint import Position
from ddp_hydra.training.lr_schedules import Curve


class Progress:
    """Counts a run in steps of the global batch that it began with.

    After a resume with another global batch, one step more is more or less than one of these. A schedule that counts
    them follows the same curve, and comes to its end with the run.

    Args:
        epochs: of the run; None where only max_steps counts.
        max_steps: optimizer steps of the run; None where only epochs count.
        sampler: the training sampler.
        position: of the run, which moves on.

    Attributes:
        global_batch: samples in a step, when the run began.
        epoch_steps: steps in an epoch, when the run began.
        taken: steps that a scheduler of torch has taken.
    """

    def __init__(self, epochs: int | None, max_steps: int | None, sampler: Any, position: Position) -> None:
        self.epochs, self.max_steps, self.sampler, self.position = epochs, max_steps, sampler, position
        self.global_batch: int = sampler.global_batch
        self.epoch_steps = len(sampler)
        self.taken = 0

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return min(length for _, length in self._limits())

    @property
    def done(self) -> float:
        """Steps done: a whole number as long as the global batch stays.

        A run of epochs goes by its samples. One of max_steps goes by its steps, however large they are; where both
        limit it, by the one that is nearer to its end.
        """
        total = self.total
        done = max(count * total / length for count, length in self._limits())
        return int(done) if done == int(done) else done

    def _limits(self) -> Iterator[tuple[float, int]]:
        """Yield what ends the run: how far it is, and where that would be."""
        if self.epochs:
            began, now = self.epoch_steps * self.global_batch, len(self.sampler) * self.sampler.global_batch
            passed = self.position.offset * self.epoch_steps / max(began, now)
            yield self.position.epoch * self.epoch_steps + passed, self.epochs * self.epoch_steps
        if self.max_steps:
            yield self.position.step, self.max_steps

    def move(self, scheduler: Any) -> None:
        """Bring a scheduler to where the run is: one of torch's, which knows whole steps only, to the last of these."""
        if isinstance(scheduler, Curve):
            scheduler.go_to(self.done)
            return
        while self.taken < int(self.done):
            self.taken += 1
            scheduler.step()

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        return {"global_batch": self.global_batch, "epoch_steps": self.epoch_steps, "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Put it back."""
        self.global_batch, self.epoch_steps = int(state["global_batch"]), int(state["epoch_steps"])
        self.taken = int(state["taken"])
