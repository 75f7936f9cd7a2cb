"""Steps whose loss or gradient is not finite: given up, left out, or rolled back from, by all ranks alike."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp_hydra import results
from ddp_hydra.errors import NonFiniteLoss
from ddp_hydra.training.checkpoint import State, begin_copy, refuse_nonfinite

SHOWN = 64
"""Sample ids named in a message; all of them are in the record."""
NAMED = 6
"""Parameters named in a message; all of them are in the record."""


@dataclass(frozen=True)
class Trouble:
    """A step that may not count.

    Args:
        bad_rank: the first rank that found it.
        loss: of the step, on this rank.
        gradients: names of parameters whose gradient is not finite; none where the loss is not.
        ago: steps since then: 1 for the step before the one under way.
    """

    bad_rank: int
    loss: float
    gradients: Sequence[str] = ()
    ago: int = 0


class NonFinite:
    """What to do about a step whose loss is not finite on some rank, or whose gradient is not.

    Args:
        policy: abort raises; skip leaves the step's update out; rollback also goes back to the last checkpoint
            first, in case the weights had gone wrong before, and leaves the step out when it comes to it again.
        most: bad steps to put up with.
        state: of the run.
    """

    def __init__(self, policy: str, most: int, state: State) -> None:
        self.policy, self.most, self.state = policy, most, state
        self.seen: list[int] = []
        self.buffers = list(state.model.buffers()) if policy != "abort" else []
        self.kept_buffers = [buffer.clone() for buffer in self.buffers]
        self.kept: Callable[[], dict[str, Any]] | None = None
        self.keep()

    def keep(self) -> None:
        """At a checkpoint: this is where a rollback goes."""
        if self.policy == "rollback":
            self.kept = self.state.begin_capture()

    @torch.no_grad()
    def before_step(self) -> None:
        """Remember what a forward pass changes: BatchNorm's statistics take up a NaN for good."""
        for kept, buffer in zip(self.kept_buffers, self.buffers, strict=True):
            kept.copy_(buffer)

    @torch.no_grad()
    def refuse(self, trouble: Trouble, rank: int, samples: Sequence[int]) -> bool:
        """Deal with a bad step.

        Args:
            trouble: what is bad.
            rank: this rank.
            samples: this rank's, in the step.

        Returns:
            Whether the run went back to its last checkpoint; otherwise the step is to be left out.

        Raises:
            NonFiniteLoss: by policy, or because there were too many.
        """
        step = self.state.position.step + 1 - trouble.ago
        tell(step, trouble, rank, samples)
        again = step in self.seen
        if not again:
            self.seen.append(step)
        if self.policy == "abort" or len(self.seen) > self.most:
            raise NonFiniteLoss(self._say(step, trouble, rank, samples), consequence=rank != trouble.bad_rank)
        for kept, buffer in zip(self.kept_buffers, self.buffers, strict=True):
            buffer.copy_(kept)
        if self.policy == "skip" or again:
            return False
        assert self.kept is not None
        content = self.kept()
        refuse_nonfinite(content, self.state)
        self.state.restore(begin_copy(content)())  # a copy: the optimizer goes on with the very tensors it is given
        return True

    def _say(self, step: int, trouble: Trouble, rank: int, samples: Sequence[int]) -> str:
        gradients = trouble.gradients
        if rank != trouble.bad_rank:
            what = "gradient" if gradients else "loss"
            return f"rank {trouble.bad_rank} found a {what} that is not finite in step {step}"
        bad, advice = f"the loss is {trouble.loss} in step {step}", ""
        if gradients:
            names = ", ".join(gradients[:NAMED]) + (", …" if len(gradients) > NAMED else "")
            bad = f"the gradient of {names} is not finite in step {step}, although the loss is {trouble.loss:.4g}"
            advice = ", have debug=anomaly name the operation that it comes from"
        ids = ", ".join(map(str, samples[:SHOWN])) + (", …" if len(samples) > SHOWN else "")
        spent = f", and {self.most} such steps were allowed (trainer.max_nonfinite)" if self.policy != "abort" else ""
        return (
            f"{bad}{spent}; samples of this rank: {ids}. Lower optimizer.lr, look at these samples{advice}, or go on "
            "without such steps with trainer.on_nonfinite=skip or rollback"
        )


def tell(step: int, trouble: Trouble, rank: int, samples: Sequence[int]) -> None:
    """Record the samples of a bad step: on the ranks whose loss was bad, on all whose gradient was."""
    if trouble.gradients or not math.isfinite(trouble.loss):
        found = {"step": step, "rank": rank, "loss": str(trouble.loss), "samples": [int(sample) for sample in samples]}
        found |= {"gradients": list(trouble.gradients)} if trouble.gradients else {}
        print(f"{'gradient' if trouble.gradients else 'loss'} not finite: {json.dumps(found)}")  # noqa: T201
        results.text("nonfinite", json.dumps(found), step=step)
    elif rank == 0:
        print(f"loss or gradient not finite on rank {trouble.bad_rank} in step {step}")  # noqa: T201
