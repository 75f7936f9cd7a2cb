"""Classifies: one class for each sample, or for each place of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_hydra.tasks.base import Step, Task, inputs


class Classification(Task):
    """Computes the loss, and counts the correct answers.

    A batch is (x, y). There is an accuracy if `y` holds class numbers, or shares of classes of which the largest
    counts; otherwise only a loss.

    Args:
        criterion: (prediction, target) -> mean loss. Its attribute `for_validation`, if it has one, replaces it there.
        mix: (x, y) -> (x, y): mixes the samples of a micro-batch in training, as mixup does; None: no mixing.
        class_axis: axis of the prediction that holds the classes; see `classes`.
        names: of the classes; predictions name them.
    """

    def __init__(
        self,
        criterion: Callable[[Tensor, Tensor], Tensor],
        mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        class_axis: int | None = -1,
        names: tuple[str, ...] = (),
    ) -> None:
        self.criterion, self.mix, self.class_axis, self.names = criterion, mix, class_axis, names
        self.validation_criterion = getattr(criterion, "for_validation", criterion)

    def step(self, model: Any, batch: Any) -> Step:
        """Mix the samples, and compute the loss."""
        x, y = batch if self.mix is None else self.mix(*batch)
        return self._counted(self.criterion, model(x), y)

    def validation_step(self, model: Any, batch: Any) -> Step:
        """Compute the loss of samples as they are."""
        x, y = batch
        return self._counted(self.validation_criterion, model(x), y)

    def _counted(self, criterion: Callable[[Tensor, Tensor], Tensor], prediction: Tensor, y: Tensor) -> Step:
        loss = criterion(prediction, y)
        with torch.no_grad():
            pair = classes(prediction, y, self.class_axis)
            if pair is None:
                return Step(loss, y.numel(), {}, prediction, y)
            guess, truth = pair
            correct = (guess == truth).sum()
        return Step(loss, truth.numel(), {"correct": correct}, prediction, y)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean loss, and the accuracy if there are classes."""
        found = super().metrics(sums)
        if "correct" in found:
            found["accuracy"] = found.pop("correct")
        return found

    def update_metric(self, metric: Any, step: Step) -> None:
        """Give a metric (answers, classes) scores, and as many class numbers; perplexity needs the time axis.

        A target in the shape of the scores holds a number for each class, and stays like them.
        """
        axis = -1 if self.class_axis is None else self.class_axis
        scores = step.prediction.float().movedim(axis, -1)
        if type(metric).__name__ == "Perplexity":
            metric.update(scores, step.target)
        elif step.target.shape == step.prediction.shape:
            metric.update(*(part.reshape(-1, part.shape[-1]) for part in (scores, step.target.movedim(axis, -1))))
        else:
            metric.update(scores.flatten(0, -2), step.target.flatten())

    def predict(self, model: Any, batch: Any) -> dict[str, Any]:
        """Return the likeliest class, its probability, and its name if the classes have names."""
        axis = -1 if self.class_axis is None else self.class_axis
        probability, best = model(inputs(batch)).float().softmax(axis).max(axis)
        named = {"name": [self.names[one] for one in best.tolist()]} if self.names and best.ndim == 1 else {}
        return {"class": best, **named, "probability": probability}


def classes(output: Tensor, target: Tensor, class_axis: int | None) -> tuple[Tensor, Tensor] | None:
    """Return the predicted and the true classes; None if the target holds no classes.

    Args:
        output: the model's output.
        target: class numbers, in the shape of `output` without its class axis; or shares of classes, in the shape of
            `output`; or anything else, which has no classes.
        class_axis: the axis of `output` that holds classes; None if the loss knows no classes: then a target in the
            shape of `output` does not hold shares.
    """
    if output.ndim < 2:
        return None
    if target.is_floating_point():
        is_shares = class_axis is not None and target.shape == output.shape and output.shape[class_axis] > 1
        return (output.argmax(class_axis), target.argmax(class_axis)) if is_shares else None
    for axis in dict.fromkeys((-1 if class_axis is None else class_axis, -1, 1)):
        without = list(output.shape)
        if without.pop(axis) > 1 and list(target.shape) == without:
            return output.argmax(axis), target
    return None
