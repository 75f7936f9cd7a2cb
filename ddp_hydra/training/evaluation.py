"""Evaluates a model: every sample counts exactly once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_hydra import heartbeat
from ddp_hydra.data.loader import Loader
from ddp_hydra.tasks import Step, Task
from ddp_hydra.training import step_errors
from ddp_hydra.training.eval_metrics import EvalMetrics
from ddp_hydra.training.metrics import Meter, count, named


@dataclass
class Evaluation:
    """Evaluates a model on a data set.

    Args:
        loader: of the data set.
        batch_size: per rank.
        autocast: the context of the forward pass.
        task: computes the loss and counts.
        metrics: additional metrics; None for none.
        prefix: of the metrics' names.
    """

    loader: Loader
    batch_size: int
    autocast: Any
    task: Task
    metrics: EvalMetrics | None = None
    prefix: str = "val"

    @torch.no_grad()
    def run(self, model: nn.Module, stop: Callable[[], Any] = lambda: False) -> dict[str, float]:
        """Return the metrics of the task, and the additional ones. A collective.

        The ranks' shares of the samples may differ in size.

        Args:
            model: not wrapped in DDP.
            stop: returns whether to end early; then the numbers mean nothing.
        """
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        if distributed:
            for buffer in model.buffers():  # BatchNorm's statistics may differ; rank 0's are saved
                dist.broadcast(buffer, src=0)
        model.eval()
        meter = Meter(self.loader.device)
        for batch, indices in self.loader.each_once(self.batch_size, rank, world_size):
            with self.autocast, step_errors.explained(batch):
                step = self.task.validation_step(model, batch)
            step = step if isinstance(step, Step) else Step(step)
            meter.add(count(step, len(indices)))
            if self.metrics is not None:
                self.metrics.add(self.task, step)
            heartbeat.progress()
            if stop():
                break
        sums = meter.result()
        own = named(self.prefix, self.task.metrics(sums)) if sums else {}
        return own | (self.metrics.result(self.prefix) if self.metrics is not None else {})

    def show(self, step: int) -> None:
        """Send pictures of the matrices among the last metrics; called on rank 0."""
        if self.metrics is not None:
            self.metrics.show(step)
