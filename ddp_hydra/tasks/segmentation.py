"""Classifies each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks.base import Step, Task, inputs, output_of, pair
from ddp_hydra.tasks.classification import head_of
from ddp_hydra.tasks.counting import IGNORED, Counting


class Segmentation(Task):
    """Computes the loss, the accuracy of the pixels, and the mean intersection over union (IoU) of the classes.

    A batch is (images, masks), with masks of class numbers (batch, height, width). A model of one channel tells
    class 1 from class 0: its output is the logit of class 1, or the probability where the criterion takes that.
    Its masks may also hold shares of class 1, from 0 to 1: the loss takes them as they are, and the metrics take more
    than 0.5 for class 1.

    Args:
        criterion: (logits (batch, classes, height, width), masks) -> mean loss over the pixels, see `Counting`; None:
            cross-entropy. With one channel, a criterion as torch's BCEWithLogitsLoss is given the outputs and the
            targets of the pixels that count, (pixels,) floats.
        ignore: the mask's number for pixels that don't count; None: the criterion's, -100 if it has none. A
            criterion of your own has to leave them out, too.
    """

    def __init__(self, criterion: Callable[[Tensor, Tensor], Tensor] | None = None, ignore: int | None = None) -> None:
        self.criterion = criterion or nn.CrossEntropyLoss(ignore_index=IGNORED if ignore is None else ignore)
        self.counting = Counting(self.criterion)
        self.counting.key = "task.criterion"
        self.note, self.head = self.counting.note, head_of(self.criterion)
        self.ignore = self.counting.ignore if ignore is None else ignore

    def step(self, model: Any, batch: Any) -> Step:
        """Compute the loss, and the sums of pixels for each class."""
        x, given = pair(batch)
        logits = output_of(model, x)
        if logits.ndim != 4 or logits.shape[2:] != given.shape[1:]:
            raise ConfigError(
                f"the model's output is {tuple(logits.shape)} and the masks are {tuple(given.shape)}: segmentation "
                "needs an output of (batch, classes, height, width) and masks of (batch, height, width)"
            )
        masks, n_classes = given.long(), max(logits.shape[1], 2)
        if has_shares := given.is_floating_point() and bool((given != masks).any()):
            masks = self._rounded(given, logits.shape[1])
        counted = masks != self.ignore
        truth = masks[counted]
        prediction, target = self._pair(logits, given if has_shares else masks, counted)
        if len(wrong := truth[(truth < 0) | (truth >= n_classes)]):
            raise ConfigError(
                f"the masks hold class {int(wrong[0])}, and the model's output has "
                f"{text.counted(logits.shape[1], 'channel')}, which tells classes 0 to {n_classes - 1}: give "
                "masks of these numbers, or task.ignore=<class>"
            )
        loss = self.counting.loss(prediction, target)
        with torch.no_grad():
            guess = self._classes(logits)[counted]
            own, guessed = (torch.bincount(part, minlength=n_classes) for part in (truth, guess))
            both = torch.bincount(guess[guess == truth], minlength=n_classes)
            sums: dict[str, Any] = {"intersection": both, "union": guessed + own - both, "pixels": len(truth)}
            n = self.counting.n(prediction, target) if self.counting.kind else len(masks)
        return Step(loss, n, sums, logits, masks, self.counting.summed)

    def _rounded(self, masks: Tensor, n_channels: int) -> Tensor:
        """Return the class numbers of masks that hold shares of class 1."""
        counted = masks != self.ignore
        is_wrong = counted & ~((masks >= 0) & (masks <= 1)) if n_channels == 1 else masks != masks.long()
        wrong = masks[is_wrong]
        if len(wrong):
            raise ConfigError(
                f"the masks hold {float(wrong[0]):.4g}: give class numbers, which a transform keeps by v2.PILToTensor "
                "and by v2.ToDtype with scale=False, or shares of one class, 0 to 1, with a model of one channel and "
                "'task.criterion={_target_: torch.nn.BCEWithLogitsLoss}'"
            )
        return (masks > 0.5).long().where(counted, self.ignore)

    def _pair(self, logits: Tensor, masks: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        if logits.shape[1] > 1:
            return logits, masks
        if self.counting.kind == "classes":
            raise ConfigError(
                "the model's output has one channel, whose cross-entropy is 0 whatever it is: give the model two "
                "channels, or the loss of one, 'task.criterion={_target_: torch.nn.BCEWithLogitsLoss}'"
            )
        if not self.head:
            return logits, masks
        output, target = logits[:, 0][counted], masks[counted]
        if target.is_floating_point():  # shares, which a bfloat16 would round
            output = output.to(torch.promote_types(output.dtype, torch.float32))
        return output, target.to(output.dtype)

    def _classes(self, logits: Tensor) -> Tensor:
        if logits.shape[1] > 1:
            return logits.argmax(1)
        return (logits[:, 0] > (0.5 if self.head == "probabilities" else 0.0)).long()

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return loss, accuracy and iou; classes that are neither there nor predicted don't count."""
        found = super().metrics({name: total for name, total in sums.items() if name in ("loss", "loss/sum", "n")})
        if not sums["pixels"]:
            return found
        seen = sums["union"] > 0
        iou = (sums["intersection"] / sums["union"].clamp(min=1))[seen].mean()
        return {**found, "accuracy": float(sums["intersection"].sum() / sums["pixels"]), "iou": float(iou)}

    def update_metric(self, metric: Any, step: Step) -> None:
        """Give a metric the output and the masks; metrics of classes get the pixels that count alone.

        With one channel, the output is the probability of class 1, (batch, height, width).
        """
        scores, masks = step.prediction.float(), step.target
        if scores.shape[1] == 1:
            scores = scores[:, 0] if self.head == "probabilities" else scores[:, 0].sigmoid()
        if type(metric).__module__.startswith("torchmetrics.classification."):
            counted = masks != self.ignore
            scores, masks = (scores if scores.ndim == 3 else scores.movedim(1, -1))[counted], masks[counted]
        metric.update(scores, masks)

    def predict(self, model: Any, batch: Any) -> Tensor:
        """Return the class of each pixel, (batch, height, width): uint8, or int32 for more than 256 classes."""
        logits = output_of(model, inputs(batch))
        return self._classes(logits).to(torch.uint8 if logits.shape[1] <= 256 else torch.int32)
