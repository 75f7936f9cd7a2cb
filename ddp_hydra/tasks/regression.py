"""Predicts numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks.base import Step, Task, inputs, output_of, pair
from ddp_hydra.tasks.counting import Counting


class Regression(Task):
    """Computes the loss, the mean absolute error, and the share of the variance that is explained (R²).

    A batch is (x, y), with y float (batch,) or (batch, outputs). A target that is NaN is not known: the metrics leave
    it out, and the criterion has to.

    Args:
        criterion: (prediction, target) -> mean loss, see `Counting`.
    """

    def __init__(self, criterion: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.criterion, self.counting = criterion, Counting(criterion)
        self.note = self.counting.note

    def step(self, model: Any, batch: Any) -> Step:
        """Compute the loss, and the sums of errors and squares for each output."""
        x, y = pair(batch)
        prediction = flat_if_single(output_of(model, x), y)
        if prediction.dtype in (torch.bfloat16, torch.float16):  # of autocast, which would round the targets
            prediction = prediction.float()
        y = y.to(prediction.dtype)
        loss = self.counting.loss(prediction, y)
        with torch.no_grad():
            error, truth = (part.reshape(len(y), -1).double() for part in (prediction - y, y))
            counted = ~truth.isnan()
            error, truth = error.where(counted, 0.0), truth.where(counted, 0.0)
            sums = {
                "samples": counted.sum(0),
                "absolute_error": error.abs().sum(0),
                "squared_error": error.square().sum(0),
                "target": truth.sum(0),
                "squared_target": truth.square().sum(0),
            }
        return Step(loss, self.counting.n(prediction, y), sums, prediction, y, self.counting.summed)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return loss, mae and r2, means over the outputs; no r2 where the targets are all equal."""
        found = super().metrics({name: total for name, total in sums.items() if name in ("loss", "loss/sum", "n")})
        there = sums["samples"] > 0
        if not bool(there.any()):
            return found
        n, absolute, squared, total, of_squares = (
            sums[name][there] for name in ("samples", "absolute_error", "squared_error", "target", "squared_target")
        )
        variance = of_squares - total.square() / n
        found["mae"] = float((absolute / n).mean())
        if bool((variance > 1e-12 * of_squares).all()):
            found["r2"] = float((1 - squared / variance).mean())
        return found

    def predict(self, model: Any, batch: Any) -> Tensor:
        """Return the predicted numbers, (batch,) or (batch, outputs)."""
        output = output_of(model, inputs(batch))
        return output.squeeze(-1) if output.ndim == 2 and output.shape[-1] == 1 else output


def flat_if_single(prediction: Tensor, target: Tensor) -> Tensor:
    """Return a prediction of (batch, 1) as (batch,) where the target is (batch,).

    Raises:
        ConfigError: their shapes differ otherwise; a loss would broadcast them to a wrong number.
    """
    if prediction.ndim == target.ndim + 1 and prediction.shape[-1] == 1:
        prediction = prediction.squeeze(-1)
    if prediction.shape != target.shape:
        raise ConfigError(
            f"the model's output is {tuple(prediction.shape)}, but the target is {tuple(target.shape)}: both must "
            f"have the same shape, as by model.num_classes={target[:1].numel()}"
        )
    return prediction
