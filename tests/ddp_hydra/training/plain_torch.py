"""The reference of runs of the loop: the same training in a few lines of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_hydra.data.samplers import Distributed
from tests.ddp_hydra.training.loop_runs import Numbers

CONSTANT = {"_target_": "ddp_hydra.training.lr_schedules.constant"}


class Net(nn.Module):
    """Two layers whose first weights are always the same."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 5, bias=bias), nn.Linear(5, 3, bias=bias)
        begin_alike(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def begin_alike(model: nn.Module) -> None:
    """Give the parameters values that don't depend on the global generator."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)


def rates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    epochs: int = 2,
    judge: Callable[[int], float] | None = None,
) -> list[float]:
    """Train a model, and return the learning rate of each step.

    Args:
        judge: epochs done -> the value that the scheduler is given after each; None: it is stepped after each step.
    """
    data, sampler, taken = Numbers(9), Distributed(9, 2), []
    for epoch in range(epochs):
        for indices in sampler.batches(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[list(indices)]), data.y[list(indices)]).backward()
            taken.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            if scheduler is not None and judge is None:
                scheduler.step()
        if judge is not None:
            scheduler.step(judge(epoch + 1))
    return taken
