"""Steps whose loss is not a number: given up, left out, or rolled back from, by all ranks alike."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddp_hydra import results
from ddp_hydra.checkpoint import State, begin_copy
from ddp_hydra.errors import NonFiniteLoss

SHOWN = 64
"""Sample ids named in a message; all of them are in the record."""


class NonFinite:
    """What to do about a step whose loss is not finite on some rank.

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
    def refuse(self, bad_rank: int, rank: int, loss: float, samples: Sequence[int]) -> bool:
        """Deal with a bad step.

        Args:
            bad_rank: the first rank that said so.
            rank: this rank.
            loss: this rank's.
            samples: this rank's, in the step.

        Returns:
            Whether the run went back to its last checkpoint; otherwise the step is to be left out.

        Raises:
            NonFiniteLoss: by policy, or because there were too many.
        """
        step = self.state.position.step + 1
        tell(step, bad_rank, rank, loss, samples)
        again = step in self.seen
        if not again:
            self.seen.append(step)
        if self.policy == "abort" or len(self.seen) > self.most:
            raise NonFiniteLoss(self._say(step, bad_rank, rank, loss, samples), consequence=rank != bad_rank)
        for kept, buffer in zip(self.kept_buffers, self.buffers, strict=True):
            buffer.copy_(kept)
        if self.policy == "skip" or again:
            return False
        assert self.kept is not None
        self.state.restore(begin_copy(self.kept())())  # a copy: the optimizer goes on with the very tensors it is given
        return True

    def _say(self, step: int, bad_rank: int, rank: int, loss: float, samples: Sequence[int]) -> str:
        if rank != bad_rank:
            return f"rank {bad_rank} found a loss that is not finite in step {step}"
        ids = ", ".join(map(str, samples[:SHOWN])) + (", …" if len(samples) > SHOWN else "")
        spent = f", and {self.most} such steps were allowed (trainer.max_nonfinite)" if self.policy != "abort" else ""
        return (
            f"the loss is {loss} in step {step}{spent}; samples of this rank: {ids}. Lower optimizer.lr, look at these "
            "samples, or go on without such steps with trainer.on_nonfinite=skip or rollback"
        )


def tell(step: int, bad_rank: int, rank: int, loss: float, samples: Sequence[int]) -> None:
    """Record the samples of a bad step, on the ranks that had it; rank 0 counts it."""
    if not math.isfinite(loss):
        found = {"step": step, "rank": rank, "loss": str(loss), "samples": [int(sample) for sample in samples]}
        print(f"loss not finite: {json.dumps(found)}")  # noqa: T201
        results.text("nonfinite", json.dumps(found), step=step)
    elif rank == 0:
        print(f"loss not finite on rank {bad_rank} in step {step}")  # noqa: T201


def are_finite(losses: Sequence[torch.Tensor]) -> bool | Callable[[], bool]:
    """Whether all parts of a step have a loss that is a number.

    Of losses on a GPU a function tells: the backward pass can be given to the GPU before the forward pass is done.
    """
    good = torch.stack(list(losses)).isfinite().all()
    if not good.is_cuda:
        return bool(good)
    arrives, done = good.to("cpu", non_blocking=True), torch.cuda.Event()
    done.record()

    def look() -> bool:
        done.synchronize()
        return bool(arrives)

    return look
