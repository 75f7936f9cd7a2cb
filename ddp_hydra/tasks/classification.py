"""Classifies: one class for each sample, or for each place of it; or the next token of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks.base import Step, Task, inputs, output_of, pair, target_of
from ddp_hydra.tasks.counting import IGNORED, Counting, shape_of, update_counted
from ddp_hydra.tasks.losses import CrossEntropy


class Classification(Task):
    """Computes the loss, and counts the correct answers.

    A batch is (x, y). There is an accuracy if `y` holds class numbers, or shares of classes of which the largest
    counts; otherwise only a loss. Where the criterion has a classifier of its own, as ArcFace has, the model's output
    holds no classes: there is no accuracy, and the output is what is predicted.

    Args:
        criterion: (prediction, target) -> mean loss, see `Counting`. Its attribute `for_validation`, if it has one,
            replaces it there.
        mix: (x, y) -> (x, y): mixes the samples of a micro-batch in training, as mixup does; None: no mixing.
        class_axis: axis of the prediction that holds the classes, if the criterion does not tell; see `classes`.
        names: of the classes; predictions name them.
        guesses_axis: where the criterion does not tell its axis, and the shapes of batches say another one than
            `class_axis`, take that.
    """

    def __init__(
        self,
        criterion: Callable[[Tensor, Tensor], Tensor],
        mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        class_axis: int | None = -1,
        names: tuple[str, ...] = (),
        guesses_axis: bool = True,
    ) -> None:
        self.criterion, self.mix, self.names = criterion, mix, names
        self.validation_criterion = getattr(criterion, "for_validation", criterion)  # a part, which goes to the device
        self.counting, self.validation_counting = Counting(criterion), Counting(self.validation_criterion)
        own_axis = self.counting.class_axis
        self.class_axis = class_axis if own_axis is None else own_axis
        self.guesses_axis = guesses_axis and own_axis is None and class_axis != 1
        self.found_axis: int | None = None
        self.note = self.counting.note
        weights = criterion.parameters() if isinstance(criterion, nn.Module) else ()
        self.head_sizes = {
            size for one in weights if one.ndim == 2 and one.shape[0] != one.shape[1] for size in one.shape
        }

    def step(self, model: Any, batch: Any) -> Step:
        """Mix the samples, and compute the loss."""
        x, y = self.mixed(batch)
        return self.counted(self.counting, output_of(model, x), y)

    def mixed(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a micro-batch, mixed."""
        x, y = pair(batch)
        if self.mix is None:
            return x, y
        try:
            x, y = self.mix(x, y)
        except (ValueError, RuntimeError, TypeError) as error:
            # torchvision's take images and class numbers. Other errors of these kinds may be mistakes in a mix, or a
            # device's.
            is_known = type(self.mix).__module__.startswith("torchvision.") and type(error) in (RuntimeError, TypeError)
            if not isinstance(error, ValueError) and (not is_known or "CUDA error" in str(error)):
                raise
            given = ", ".join(f"{name} {shape_of(part)}" for name, part in (("x", x), ("y", y)))
            what = f"{type(self.mix).__name__} (mix=) does not take {given}"
            raise ConfigError(f"{what} ({error}): {_mixable(x, y)}give mix=none, or a mix of your own") from error
        return x, y

    def validation_step(self, model: Any, batch: Any) -> Step:
        """Compute the loss of samples as they are."""
        x, y = pair(batch)
        return self.counted(self.validation_counting, output_of(model, x), y)

    def counted(self, counting: Counting, prediction: Tensor, y: Tensor) -> Step:
        """Compute the loss and the accuracy of a prediction; `counting` is of the training or of the validation."""
        loss = counting.loss(prediction, y)
        with torch.no_grad():
            n = counting.n(prediction, y)
            sums: dict[str, Any] = {}
            has_classes = self.has_classes(prediction)
            if has_classes and (found := classes(prediction, y, self.axis_of(prediction, y))) is not None:
                guess, truth = found
                correct = guess == truth
                if truth is not y:  # shares, which all count
                    counted: Any = truth.numel()
                elif counting.kind == "classes" and counting.weight is None:
                    counted = n
                else:
                    counted = counting.counted(truth)
                if truth is y and counting.ignore >= 0:
                    correct &= truth != counting.ignore
                sums = {"accuracy": (correct.sum(), counted)}
        return Step(loss, n, sums, prediction, y, counting.summed)

    def axis_of(self, output: Tensor, target: Tensor | None) -> int | None:
        """Return the axis of an output that holds the classes; None if the criterion knows no classes.

        A criterion that does not tell it may take (batch, classes, time) or (batch, time, classes): class numbers say
        which by their shape, in this batch or in an earlier one.

        Raises:
            ConfigError: nothing says which.
        """
        if not self.guesses_axis or output.ndim < 3:
            return self.class_axis
        if target is None or target.is_floating_point():  # their shape says nothing
            return self.class_axis if None in (self.class_axis, self.found_axis) else self.found_axis
        shape = list(output.shape)
        without = {axis: shape[:axis] + shape[axis:][1:] for axis in (-1, 1) if shape[axis] > 1}
        fitting = [axis for axis, others in without.items() if list(target.shape) == others]
        if len(fitting) == 1:
            self.found_axis = fitting[0]
        elif fitting and self.found_axis is None:
            own = self.counting.name
            raise ConfigError(
                f"{own} is given outputs of {tuple(output.shape)}, and targets of {tuple(target.shape)}: classes may "
                f"be axis 1, as torch's losses have them, or the last axis. Give +task.class_axis=1, or -1 for the "
                f"last one, or set {own}.class_axis"
            )
        return self.found_axis if fitting else self.class_axis

    def has_classes(self, output: Tensor) -> bool:
        """Return whether the model's output can hold classes: False for the input of a classifier in the criterion."""
        axis = -1 if self.class_axis is None else self.class_axis
        return output.ndim < 2 or output.shape[axis] not in self.head_sizes

    def update_metric(self, metric: Any, step: Step) -> None:
        """Give a metric (answers, classes) scores, and as many class numbers; perplexity needs the time axis.

        A target in the shape of the scores holds a number for each class, and stays like them.
        """
        axis = self.axis_of(step.prediction, step.target)
        axis = -1 if axis is None else axis
        if not self.has_classes(step.prediction) and type(metric).__module__.startswith("torchmetrics.classification"):
            own = type(self.criterion).__name__
            raise ConfigError(f"{type(metric).__name__} needs scores of classes, which {own} keeps: give metrics=none")
        scores = step.prediction.float().movedim(axis, -1)
        if is_samplewise(metric):
            metric.update(scores.movedim(-1, 1), step.target)
        elif step.target.shape == step.prediction.shape:
            target = step.target.movedim(axis, -1)
            if type(metric).__name__.startswith(("Binary", "Multilabel")):
                # Such a metric would guess from each batch whether it gets logits, and takes whole targets.
                scores = scores.sigmoid() if head_of(self.criterion) == "logits" else scores
                target = target.long()
            metric.update(*(part if part.ndim == 1 else part.reshape(-1, part.shape[-1]) for part in (scores, target)))
        else:
            update_counted(metric, scores, step.target, self.counting.ignore)

    def predict(self, model: Any, batch: Any) -> dict[str, Any]:
        """Return the likeliest class, its probability, and its name if the classes have names.

        Where the loss knows no classes, return each output by itself: as a probability where the loss says that it is
        one, and with the likeliest class where the batch holds class numbers.
        """
        output, head = output_of(model, inputs(batch)).float(), head_of(self.criterion)
        if not self.has_classes(output):
            return {"prediction": output}
        target = target_of(batch)
        axis = None if self.class_axis is None else self.axis_of(output, target)
        if axis is not None and output.shape[axis] > 1:
            shares = {"logits": output.sigmoid(), "probabilities": output}.get(head, output.softmax(axis))
            probability, best = shares.max(axis)
            return {"class": best, **self._named(best), "probability": probability}
        if head:
            return {"probability": output.sigmoid() if head == "logits" else output}
        pair = None if target is None else classes(output, target, self.axis_of(output, target))
        return {**({"class": pair[0], **self._named(pair[0])} if pair else {}), "prediction": output}

    def _named(self, best: Tensor) -> dict[str, Any]:
        return {"name": [self.names[one] for one in best.tolist()]} if self.names and best.ndim == 1 else {}


def _mixable(x: Any, y: Tensor) -> str:
    """Return what makes a batch one that torchvision's mixes take, as far as its types tell."""
    how = []
    if isinstance(x, Tensor) and not x.is_floating_point():
        how.append("make floats of x with a transform, such as v2.ToDtype(torch.float32, scale=True)")
    if y.ndim == 1 and y.dtype != torch.int64 and not y.is_floating_point():
        how.append("let the data set return y.long()")
    return f"{' and '.join(how)}, or " if how else ""


def is_samplewise(metric: Any) -> bool:
    """Return whether a metric of torchmetrics computes a number for each sample, of which the mean is logged."""
    return getattr(metric, "multidim_average", "") == "samplewise"


_HEADS = {
    "BCEWithLogitsLoss": "logits",
    "MultiLabelSoftMarginLoss": "logits",
    "SoftMarginLoss": "logits",
    "binary_cross_entropy_with_logits": "logits",
    "multilabel_soft_margin_loss": "logits",
    "soft_margin_loss": "logits",
    "sigmoid_focal_loss": "logits",
    "BCELoss": "probabilities",
    "binary_cross_entropy": "probabilities",
}
"""What losses whose answers don't exclude each other take: the logit of each, or its probability."""


def head_of(criterion: Any) -> str:
    """Return what a loss takes each output of the model for: "logits" or "probabilities"; "" where it doesn't tell."""
    parts = [criterion, *(criterion.modules() if isinstance(criterion, nn.Module) else ())]
    for part in parts:
        function = getattr(part, "func", part)  # of a partial
        names = [getattr(function, "__name__", ""), *(base.__name__ for base in type(function).__mro__)]
        if head := next((_HEADS[name] for name in names if name in _HEADS), ""):
            return head
    return ""


def classes(output: Tensor, target: Tensor, class_axis: int | None) -> tuple[Tensor, Tensor] | None:
    """Return the predicted and the true classes; None if the target holds no classes.

    The target holds class numbers, in the shape of the output without its class axis, or shares of classes, in the
    shape of the output: these only where the loss has an axis of classes.
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


class LanguageModel(Classification):
    """Computes the cross-entropy of the next token, the perplexity, and the accuracy.

    A batch is (x, y): the model's input and the tokens that follow, (batch, time). Or it is the tokens themselves,
    (batch, time + 1), of which each but the last is an input.

    Args:
        ignore: the token of `y` that doesn't count, as for padding; None: -100 doesn't, as for torch.
    """

    def __init__(self, ignore: int | None = None) -> None:
        super().__init__(CrossEntropy(ignore_index=IGNORED if ignore is None else ignore))
        self.counting.key, self.ignore = "task", self.counting.ignore

    def mixed(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the model's input and the tokens that follow."""
        x, y = (batch[:, :-1], batch[:, 1:]) if isinstance(batch, Tensor) else pair(batch)
        return x, y.long()

    def validation_step(self, model: Any, batch: Any) -> Step:
        """Compute the loss as in training."""
        return self.step(model, batch)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return loss, accuracy and perplexity."""
        found = super().metrics(sums)
        if "loss" in found:
            found["perplexity"] = math.exp(min(found["loss"], 700.0))
        return found

    def predict(self, model: Any, batch: Any) -> dict[str, Tensor]:
        """Return the likeliest token after the last one that counts, and its probability."""
        output = output_of(model, inputs(batch))
        tokens = inputs(batch) if (target := target_of(batch)) is None else target
        if isinstance(tokens, Tensor) and tokens.shape == output.shape[:2]:
            counted = (tokens != self.ignore) & (tokens != IGNORED)
            # Of equal values, `argmax` returns the first: without a token that counts, the last place.
            places = output.shape[1] - 1 - counted.flip(1).int().argmax(1)
            if tokens is not (x := inputs(batch)) and isinstance(x, Tensor) and x.shape == tokens.shape:
                # Where the target of the last input is not known, x has that input behind the last one that counts.
                after = (places + 1).clamp(max=output.shape[1] - 1)[:, None]
                places += (after[:, 0] > places) & (x.gather(1, after) == tokens.gather(1, places[:, None]))[:, 0]
            last = output[torch.arange(len(output), device=output.device), places]
        else:
            last = output[:, -1]
        probability, best = last.float().softmax(-1).max(-1)
        return {"next": best, "probability": probability}
