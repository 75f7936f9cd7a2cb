"""Defines a training step of a classifier: its loss, and the counts for its metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from omegaconf import DictConfig
from torch import Tensor

from ddp_hydra.config import objective
from ddp_hydra.data.loader import MicroBatch
from ddp_hydra.training import builders
from ddp_hydra.training.metrics import Count, count


class Output(NamedTuple):
    """The result of a forward pass over a micro-batch.

    Args:
        loss: mean over the micro-batch, a scalar.
        prediction: the model's output.
        target: the target, after mixing.
    """

    loss: Tensor
    prediction: Tensor
    target: Tensor


class Classification:
    """Computes the loss of a micro-batch, and counts loss and correct answers.

    Args:
        criterion: (prediction, target) -> mean loss.
        mix: (x, y) -> (x, y): mixes the samples of a micro-batch, as mixup does.
        class_axis: axis of the prediction that holds the classes; see `metrics.count`.
    """

    def __init__(
        self,
        criterion: Callable[[Tensor, Tensor], Tensor],
        mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        class_axis: int | None = -1,
    ) -> None:
        self.criterion, self.mix, self.class_axis = criterion, mix, class_axis

    @classmethod
    def from_config(cls, cfg: DictConfig, train_set: Any) -> Classification:
        """Build the loss and the mix that the config names."""
        return cls(builders.loss(cfg), builders.mix(cfg, train_set), objective.class_axis(cfg))

    def forward(self, model: Callable[[Tensor], Tensor], batch: MicroBatch) -> Output:
        """Compute the model's output and the loss of a micro-batch."""
        x, y = self.mix(batch.x, batch.y)
        prediction = model(x)
        return Output(self.criterion(prediction, y), prediction, y)

    def count(self, output: Output) -> Count:
        """Count a micro-batch for the metrics of training."""
        return count(output.loss, output.prediction, output.target, self.class_axis)
