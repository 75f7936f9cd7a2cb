"""Runs a hand-written loop that exchanges gradients through gloo's sockets and through shared memory in turn."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_hydra.rank.world import World
from ddp_hydra.tasks import Task
from ddp_hydra.training.parallel.ddp import DDP
from ddp_hydra.training.train_step import TrainStep
from models.resnet import resnet18

BATCH = 32
MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: resnet18(10).to(memory_format=torch.channels_last),
    "wide": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 300), nn.ReLU(), nn.Linear(300, 10)),
    "narrow": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 20), nn.ReLU(), nn.Linear(20, 10)),
}


class Classify(Task):
    """A task that only computes the loss."""

    def step(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return F.cross_entropy(model(x), y)


def main(model: str, steps: int, result: str) -> None:
    """Do `steps` steps each way; rank 0 writes their seconds to the file `result`, as {comm_hook: [s, ...]}."""
    dist.init_process_group("gloo")
    group, ranks = dist.group.WORLD, dist.get_world_size()
    world = World(dist.get_rank(), ranks, ranks, group, group, "gloo")
    torch.set_num_threads(1)
    sides = {}
    for hook in ("none", "shared"):
        torch.manual_seed(0)
        wrapped = DDP(world, comm_hook=hook).wrap(TrainStep(Classify(), MODELS[model]()))
        sides[hook] = wrapped, torch.optim.SGD(wrapped.part.parameters(), lr=0.01, momentum=0.9, fused=True)
    took: dict[str, list[float]] = {hook: [] for hook in sides}
    for _ in range(steps):
        x, y = torch.randn(BATCH, 3, 32, 32).to(memory_format=torch.channels_last), torch.randint(10, (BATCH,))
        for hook, (wrapped, optimizer) in sides.items():
            begin = time.perf_counter()
            wrapped((x, y)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            took[hook].append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(took))
    dist.barrier()
    os._exit(0)  # a thread of torch's aborts some regular exits, after all is done


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
