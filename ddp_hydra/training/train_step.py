"""Makes a task's training step the forward pass of a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddp_hydra.tasks import Step, Task
from ddp_hydra.training import step_errors


class TrainStep(nn.Module):
    """A task's training step, for one of its updates.

    DDP wraps this module, not the model. So a task may call the model twice, parts of it, or its methods: for DDP, all
    of that is one forward pass.

    Args:
        task: computes the loss.
        model: the model of the config.
        update: the name of the update; "" for the only one.

    Attributes:
        part: what the update trains: the model, or a part of it.
    """

    def __init__(self, task: Task, model: nn.Module, update: str = "") -> None:
        super().__init__()
        self.part = task.part(model, update) if update else model
        self.update = update
        # No children of this module: DDP has to see the parameters of the part only.
        self._others: tuple[Task, Any] = (task, model)

    @property
    def call(self) -> Any:
        """The model that the task is given: the model itself, or a wrapper of it."""
        return self._others[1]

    @call.setter
    def call(self, model: Any) -> None:
        self._others = (self._others[0], model)

    def compile_model(self, mode: str) -> None:
        """Compile the model. As DDP calls this step, torch.compile cuts the graph at DDP's buckets."""
        self.call = torch.compile(self.call, mode=mode)

    def forward(self, batch: Any) -> Step:
        """Compute the loss of a micro-batch."""
        task, model = self._others
        with step_errors.explained(batch):
            step = task.step(model, batch, **({"update": self.update} if self.update else {}))
        return step if isinstance(step, Step) else Step(step)
