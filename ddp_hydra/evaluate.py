"""Evaluation: every sample exactly once, whatever the number of ranks.

`python -m ddp_hydra.evaluate run=<run dir>` repeats a run's validation with its best, last or any checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_hydra.loader import Loader
from ddp_hydra.metrics import Meter, cross_entropy
from ddp_hydra.samplers import Partition


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: Loader, n_samples: int, batch_size: int, autocast: Any, prefix: str = "val"
) -> dict[str, float]:
    """Mean loss and accuracy over a data set. A collective, though the ranks' shares may differ by a sample.

    Args:
        model: not wrapped in DDP.
        loader: of the data set.
        n_samples: its length.
        batch_size: per rank.
        autocast: the context of the forward pass.
        prefix: of the metrics' names.
    """
    distributed = dist.is_initialized() and dist.get_world_size() > 1
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    if distributed:
        for buffer in model.buffers():  # BatchNorm's statistics differ; rank 0's are those that are saved
            dist.broadcast(buffer, src=0)
    model.eval()
    meter = Meter(loader.device)
    for x, y in loader.load(Partition(n_samples, batch_size, rank, world_size).batches()):
        with autocast:
            logits = model(x)
            loss = cross_entropy(logits, y)
        meter.add(loss, logits, y)
    return meter.result(prefix)
