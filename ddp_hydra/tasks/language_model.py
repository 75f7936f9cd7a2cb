"""Predicts the next token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_hydra.tasks.base import Step, Task, inputs, pair
from ddp_hydra.tasks.counting import IGNORED


class LanguageModel(Task):
    """Computes the cross-entropy of the next token, the perplexity, and the accuracy.

    A batch is (x, y): the model's input and the tokens that follow, (batch, time). Or it is the tokens themselves,
    (batch, time + 1), of which each but the last is an input.

    Args:
        ignore: the token of `y` that doesn't count, as for padding; None: -100 doesn't, as for torch.
    """

    def __init__(self, ignore: int | None = None) -> None:
        self.ignore = ignore

    def step(self, model: Any, batch: Any) -> Step:
        """Compute the loss, and count the tokens."""
        x, y = (batch[:, :-1], batch[:, 1:]) if isinstance(batch, Tensor) else pair(batch)
        logits, y = model(x), y.long()
        ignore = IGNORED if self.ignore is None else self.ignore
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=ignore)
        with torch.no_grad():
            counted = y != ignore
            right = (logits.argmax(-1) == y) & counted
        return Step(loss, counted.sum(), {"accuracy": right.sum()}, logits, y)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return loss, accuracy and perplexity."""
        found = super().metrics(sums)
        if "loss" in found:
            found["perplexity"] = math.exp(min(found["loss"], 700.0))
        return found

    def update_metric(self, metric: Any, step: Step) -> None:
        """Give a metric scores (batch, time, tokens) and tokens (batch, time)."""
        metric.update(step.prediction.float(), step.target)

    def predict(self, model: Any, batch: Any) -> dict[str, Tensor]:
        """Return the likeliest token after the last one, and its probability."""
        probability, best = model(inputs(batch))[:, -1].float().softmax(-1).max(-1)
        return {"next": best, "probability": probability}
