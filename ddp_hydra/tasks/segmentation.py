"""Classifies each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_hydra.tasks.base import Step, Task, inputs
from ddp_hydra.tasks.counting import IGNORED, Counting


class Segmentation(Task):
    """Computes the loss, the accuracy of the pixels, and the mean intersection over union (IoU) of the classes.

    A batch is (images, masks), with masks of class numbers (batch, height, width).

    Args:
        criterion: (logits (batch, classes, height, width), masks) -> mean loss over the pixels, see `Counting`; None:
            cross-entropy.
        ignore: the mask's number for pixels that don't count; None: that of the criterion, -100 if it has none. A
            criterion of your own has to leave them out, too.
    """

    def __init__(self, criterion: Callable[[Tensor, Tensor], Tensor] | None = None, ignore: int | None = None) -> None:
        self.criterion = criterion or nn.CrossEntropyLoss(ignore_index=IGNORED if ignore is None else ignore)
        self.counting = Counting(self.criterion)
        self.note = self.counting.note
        self.ignore = self.counting.ignore if ignore is None else ignore

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
            counted = masks != self.ignore
            guess, truth = logits.argmax(1)[counted], masks[counted]
            n_classes = logits.shape[1]
            both = torch.bincount(guess[guess == truth], minlength=n_classes)
            either = torch.bincount(guess, minlength=n_classes) + torch.bincount(truth, minlength=n_classes) - both
            sums: dict[str, Any] = {"intersection": both, "union": either, "pixels": len(truth)}
            n = self.counting.n(logits, masks)
        return Step(loss, n, sums, logits, masks, self.counting.summed)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return loss, accuracy and iou; classes that are neither there nor predicted don't count."""
        found = super().metrics({name: total for name, total in sums.items() if name in ("loss", "loss/sum", "n")})
        if not sums["pixels"]:
            return found
        seen = sums["union"] > 0
        iou = (sums["intersection"] / sums["union"].clamp(min=1))[seen].mean()
        return {**found, "accuracy": float(sums["intersection"].sum() / sums["pixels"]), "iou": float(iou)}

    def predict(self, model: Any, batch: Any) -> Tensor:
        """Return the class of each pixel, (batch, height, width): uint8, or int32 for more than 256 classes."""
        logits = model(inputs(batch))
        return logits.argmax(1).to(torch.uint8 if logits.shape[1] <= 256 else torch.int32)
