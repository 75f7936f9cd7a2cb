"""Classifies each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_hydra.tasks.base import Step, Task, inputs


class Segmentation(Task):
    """Computes the loss, the accuracy of the pixels, and the mean intersection over union (IoU) of the classes.

    A batch is (images, masks), with masks of class numbers (batch, height, width).

    Args:
        criterion: (logits (batch, classes, height, width), masks) -> mean loss over the pixels; None: cross-entropy.
        ignore: the mask's number for pixels that don't count; None if all count. A criterion of your own has to leave
            them out, too.
    """

    def __init__(self, criterion: Callable[[Tensor, Tensor], Tensor] | None = None, ignore: int | None = None) -> None:
        self.ignore = ignore
        self.criterion = criterion or (
            lambda logits, masks: F.cross_entropy(logits, masks, ignore_index=-100 if ignore is None else ignore)
        )

    def step(self, model: Any, batch: Any) -> Step:
        """Compute the loss, and the sums of pixels for each class."""
        x, masks = batch
        masks = masks.long()
        logits = model(x)
        if logits.ndim != 4 or logits.shape[2:] != masks.shape[1:]:
            raise ValueError(
                f"the model's output is {tuple(logits.shape)} and the masks are {tuple(masks.shape)}: segmentation "
                "needs an output of (batch, classes, height, width) and masks of (batch, height, width)"
            )
        loss = self.criterion(logits, masks)
        with torch.no_grad():
            counted = masks != self.ignore if self.ignore is not None else torch.ones_like(masks, dtype=torch.bool)
            guess, truth = logits.argmax(1)[counted], masks[counted]
            n_classes = logits.shape[1]
            both = torch.bincount(guess[guess == truth], minlength=n_classes)
            either = torch.bincount(guess, minlength=n_classes) + torch.bincount(truth, minlength=n_classes) - both
            n = masks.numel() if self.ignore is None else counted.sum()
        if self.ignore is not None:
            loss = loss.where(n > 0, 0.0)  # without any pixel, the mean is NaN; it counts 0 times
        return Step(loss, n, {"intersection": both, "union": either}, logits, masks)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return loss, accuracy and iou; classes that are neither there nor predicted don't count."""
        n = sums["n"]
        if not n:
            return {}
        seen = sums["union"] > 0
        iou = (sums["intersection"] / sums["union"].clamp(min=1))[seen].mean()
        return {
            "loss": float(sums["loss"] / n),
            "accuracy": float(sums["intersection"].sum() / n),
            "iou": float(iou),
        }

    def predict(self, model: Any, batch: Any) -> Tensor:
        """Return the class of each pixel, (batch, height, width): uint8, or int32 for more than 256 classes."""
        logits = model(inputs(batch))
        return logits.argmax(1).to(torch.uint8 if logits.shape[1] <= 256 else torch.int32)
