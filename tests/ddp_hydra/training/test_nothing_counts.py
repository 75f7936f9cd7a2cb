"""A rank of which nothing counts adds nothing, also with sparse gradients and other settings of DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_hydra.rank.world import World, in_world
from ddp_hydra.tasks import Classification, Task
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.parallel.ddp import DDP
from ddp_hydra.training.train_step import TrainStep
from ddp_hydra.training.update import Weighing

OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}
STEPS = [([0, 2], [1, -100]), ([1, 2], [-100, -100]), ([2, 1], [0, 1])]
"""Labels of each rank in each step."""


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [part.grad.to_dense().clone() for part in model.parameters() if part.grad is not None]


@in_world
def weighed_gradients(world: World) -> dict[str, list[torch.Tensor]]:
    number = world.rank
    found: dict[str, Any] = {}
    for sparse in (False, True):
        for name, options in OPTIONS.items():
            model = Words(sparse)
            task: Task = Classification(nn.CrossEntropyLoss())
            wrapped = DDP(world, **options).wrap(TrainStep(task, model))
            weighing = Weighing(2, StepConsensus(world))
            for step, labels in enumerate(STEPS):
                model.zero_grad()
                weighing.begin()
                batch = torch.tensor([number, step + 1]), torch.tensor(labels[number])
                with wrapped.sync_gradients(True):
                    weighing.weigh(wrapped(batch), 2).backward()
                n: list[Any] = [None, None]
                dist.all_gather_object(n, float(weighing.n))
                found[f"{sparse} {name} {step}"] = [one * weighing.factor(n) for one in gradients(model)]
    return found


@pytest.mark.integration
def test_a_rank_of_which_nothing_counts_adds_nothing(on_two_ranks):
    for of_rank in on_two_ranks(weighed_gradients):
        for name, found in of_rank.items():
            step, model = int(name[-1]), Words(sparse=False)
            x, y = torch.tensor([[0, step + 1], [1, step + 1]]), torch.tensor(STEPS[step])
            F.cross_entropy(model(x.flatten()), y.flatten()).backward()
            for one, other in zip(found, gradients(model), strict=True):
                assert torch.allclose(one, other, atol=1e-6), name
