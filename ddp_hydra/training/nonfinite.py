"""Handles steps whose loss or gradient is not finite: all ranks stop, skip the step, or roll back together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_hydra import results
from ddp_hydra.errors import NonFiniteLoss
from ddp_hydra.record import RolledBack
from ddp_hydra.training.checkpoint import finite_check
from ddp_hydra.training.data_description import shown
from ddp_hydra.training.parallel.weights import BufferCopy
from ddp_hydra.training.state import TrainingState
from ddp_hydra.training.task_state import TaskState
from ddp_hydra.training.train_step import modules_of

SHOWN = 64
"""The most sample ids in a message; the record has all of them."""
NAMED = 6
"""The most parameters in a message; the record has all of them."""


@dataclass(frozen=True)
class NonFiniteStep:
    """A step whose loss or gradient is not finite.

    Args:
        bad_rank: the first rank that found it.
        loss: on this rank.
        gradients: names of the parameters whose gradient is not finite; empty if the loss is not finite.
        steps_ago: 0 for the step under way, 1 for the one before it.
    """

    bad_rank: int
    loss: float
    gradients: Sequence[str] = ()
    steps_ago: int = 0


class NonFiniteHandler:
    """Handles steps that are not finite on some rank.

    Args:
        policy: "abort" raises. "skip" leaves the step's update out. "rollback" first goes back to the last
            checkpoint, in case the weights had gone wrong before; if the step fails again, its update is left out.
        max_steps: the most steps that may fail, those before a resume included.
    """

    def __init__(self, policy: str, max_steps: int, state: TrainingState) -> None:
        self.policy, self.max_steps, self.state = policy, max_steps, state
        self.task: TaskState | None = state.extras.get("task")
        of_task = modules_of(self.task.task) if self.task is not None else []
        self.buffers = BufferCopy(state.model) if policy != "abort" else None
        self.task_buffers = BufferCopy(*(of_task if policy != "abort" else ()), removes_new=True)
        self.moving: set[str] = set()  # the task's modules that its steps write
        self.copies: dict[nn.Parameter, Tensor] = {}  # of their parameters, and of the loss's that no optimizer trains
        self.put_rest_back: Callable[[], dict[str, str]] | None = None
        self.told: set[str] = set()
        self.is_first = True
        self.checkpoint: Callable[[], dict[str, Any]] | None = None
        self.checkpoint_buffers: list[BufferCopy] = []
        self.stages = 0
        self.recorded: int | None = None  # the step of the newest rollback

    def remember(self) -> None:
        # Called before the first step, and at each checkpoint.
        if self.policy == "rollback":
            self.checkpoint = self.state.begin_capture()
            for buffers in self.checkpoint_buffers:  # new ones would need their memory beside the old ones
                buffers.save()
            if not self.checkpoint_buffers:
                self.checkpoint_buffers = [BufferCopy(module, saved=True) for module in self.state.modules()]
            self.stages = len(self.state.unfrozen)
        self._find_moving()

    def _find_moving(self) -> None:
        # After the first step and at each checkpoint. A frozen teacher is not copied.
        if self.buffers is not None and self.task is not None:
            self.moving, known = self.task.changed(), self.copies
            moved = [*self.task.parameters_of(self.moving), *self.task.moved_of_loss()]
            self.copies = {one: known[one] if one in known else torch.empty_like(one) for one in moved}

    @property
    def is_outdated(self) -> bool:
        # Parameters were unfrozen since: the copy does not fit the optimizer any more.
        return self.policy == "rollback" and self.stages != len(self.state.unfrozen)

    @torch.no_grad()
    def before_step(self) -> None:
        if self.buffers is None:
            return
        self.buffers.save()
        self.task_buffers.save()
        if self.task is not None:
            if self.is_first and self.put_rest_back is not None:  # the step before was not left out
                self.is_first = False
                self._find_moving()
            for parameter, copied in self.copies.items():
                copied.copy_(parameter)
            self.put_rest_back = self.task.copy_rest(self.moving)

    @torch.no_grad()
    def handle(self, found: NonFiniteStep, rank: int, samples: Sequence[int]) -> bool:
        step = self.state.position.step + 1 - found.steps_ago
        failed = self.state.nonfinite
        again = step in failed
        if not again:
            failed.append(step)
        is_over = self.policy == "abort" or len(failed) > self.max_steps
        goes_back = self.policy == "rollback" and not again and not is_over
        if not goes_back and step != self.recorded:
            record(step, found, rank, samples)
        if is_over:
            raise NonFiniteLoss(self._message(step, found, rank, samples), consequence=rank != found.bad_rank)
        if self.buffers is not None:
            self.buffers.put_back()
            self.task_buffers.put_back()
        for parameter, copied in self.copies.items():
            parameter.copy_(copied)
        if self.task is not None and self.is_first:  # until now, what changes was as it was built
            self.task.build_again(self.task.changed() - self.moving)
            if not all(one in self.copies for one in self.task.moved_of_loss()):
                self.task.build_loss_again()
        if self.put_rest_back is not None:
            self._tell(self.put_rest_back(), rank)
            self.put_rest_back = None
        if not goes_back:
            return False
        assert self.checkpoint is not None
        content = self.checkpoint()
        finite_check(self.state)(content)
        for buffers in self.checkpoint_buffers:  # torch's load_state_dict gives none another shape
            buffers.put_back()
        self.state.restore(content)
        for name in ("task", "callbacks"):
            if name in content:
                self._tell(self.state.extras[name].empty(content[name]), rank)
        self.state.nonfinite = failed
        results.emit(RolledBack(), self.state.position.step)
        record(step, found, rank, samples)  # after that: writers drop what comes before it from later steps
        self.recorded = step
        return True

    def _tell(self, refusals: Mapping[str, str], rank: int) -> None:
        for name, reason in refusals.items():
            if rank == 0 and name not in self.told:
                self.told.add(name)
                results.warn(
                    f"{name} keeps the state that it has: it was empty where the run goes back to, and load_state_dict "
                    f"does not take {{}} ({reason}): have it take {{}}, or return all keys in state_dict"
                )

    def _message(self, step: int, found: NonFiniteStep, rank: int, samples: Sequence[int]) -> str:
        gradients = found.gradients
        if rank != found.bad_rank:
            what = "gradient" if gradients else "loss"
            return f"rank {found.bad_rank} found a {what} that is not finite in step {step}"
        bad, advice = f"the loss is {found.loss} in step {step}", ""
        if gradients:
            names = shown(gradients, NAMED)
            bad = f"the gradient of {names} is not finite in step {step}, although the loss is {found.loss:.4g}"
            advice = ", have debug=anomaly name the operation that it comes from"
        ids = shown([str(sample) for sample in samples], SHOWN)
        spent, without = "", "go on without such steps with trainer.on_nonfinite=skip or rollback"
        if self.policy != "abort":
            spent = f", and {self.max_steps} such steps were allowed (trainer.max_nonfinite)"
            without = "allow more such steps with trainer.max_nonfinite=…"
        look = f"Lower optimizer.lr, look at these samples{advice}"
        return f"{bad}{spent}; samples of this rank: {ids}. {look}, or {without}"


def record(step: int, found: NonFiniteStep, rank: int, samples: Sequence[int]) -> None:
    # Samples of the ranks whose loss is not finite; of all ranks if a gradient is not.
    if found.gradients or not math.isfinite(found.loss):
        content = {"step": step, "rank": rank, "loss": str(found.loss), "samples": [int(sample) for sample in samples]}
        content |= {"gradients": list(found.gradients)} if found.gradients else {}
        print(f"{'gradient' if found.gradients else 'loss'} not finite: {json.dumps(content)}")  # noqa: T201
        results.text("nonfinite", json.dumps(content), step=step)
    elif rank == 0:
        print(f"loss or gradient not finite on rank {found.bad_rank} in step {step}")  # noqa: T201
