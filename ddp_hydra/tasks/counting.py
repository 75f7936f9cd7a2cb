"""Tells what a criterion is a mean over: places that count, the sum of their classes' weights, elements, or samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_hydra.errors import ConfigError

IGNORED = -100
"""The target that torch's losses and Hugging Face's data leave out."""

_CLASSES: dict[Any, Any] = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
_ELEMENTS: dict[Any, Any] = {
    nn.L1Loss: F.l1_loss,
    nn.MSELoss: F.mse_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
    nn.KLDivLoss: F.kl_div,
}
_ROWS: dict[Any, Any] = {
    nn.MultiMarginLoss: F.multi_margin_loss,
    nn.MultiLabelMarginLoss: F.multilabel_margin_loss,
    nn.MultiLabelSoftMarginLoss: F.multilabel_soft_margin_loss,
}
_OF_TORCH = (*_CLASSES, *_ELEMENTS, *_ROWS)
"""Losses whose arguments are known. A subclass may take these for a loss of its own."""
_WEIGHTED_MEANS = (F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss)
"""Functions that divide by the sum of their `weight`, which is one of elements."""


class Counting:
    """What a criterion is a mean over.

    A criterion that torch doesn't have may define `n(prediction, target)`, a number or a scalar.

    Args:
        criterion: (prediction, target) -> loss.

    Attributes:
        ignore: the target that doesn't count.
        summed: the loss is a sum, not a mean.
        name: of the criterion, for messages.
        key: of the config, whose keys are the criterion's arguments; "task" where the task makes its criterion.
        note: says for the header by what it is weighed if what it is a mean over can't be told; else "".

    Raises:
        ConfigError: the criterion returns a loss for each sample, or its means can't be put together.
    """

    key = "loss"

    def __init__(self, criterion: Callable[..., Any]) -> None:
        function: Any = criterion
        self.options: dict[str, Any] = {}
        self.whole = criterion
        while isinstance(function, partial):
            function, self.options = function.func, {**function.keywords, **self.options}
        self.criterion: Any = function
        self.kind = _kind(function, self.options)
        self.ignore = int(self._option("ignore_index", IGNORED))
        self.reduction = self._option("reduction", "mean")
        self.summed = self.reduction == "sum"
        self.name = name = getattr(function, "__name__", type(function).__name__)
        is_clear = self.kind or not isinstance(function, _OF_TORCH)
        if self.reduction == "none" and is_clear:
            raise ConfigError(f"reduction=none of {name} gives a loss for each sample: give mean or sum")
        smoothing, weight = self._option("label_smoothing", 0.0), self.weight
        if weight is not None and smoothing and not self.summed and bool((weight == 0).any()):
            raise ConfigError(f"{name} with a class of weight 0 has no mean over a batch of it: give label_smoothing=0")
        how = "as a sum, by its reduction" if self.summed else "by samples"
        is_known = self.kind or (self.summed and is_clear)
        self.note = "" if is_known else f"{name} {how}; a method n(prediction, target) of it may say otherwise"

    def _option(self, name: str, default: Any) -> Any:
        found = self.options.get(name, getattr(self.criterion, name, None))
        return default if found is None else found

    @property
    def weight(self) -> Tensor | None:
        """The weights of the classes, (classes,), by whose sum the loss is divided; None for none."""
        found = self._option("weight", None) if self.kind == "classes" else None
        return found if isinstance(found, Tensor) else None

    @property
    def class_axis(self) -> int | None:
        """The axis of the prediction that holds the classes; None for a criterion that doesn't tell."""
        of_torch = isinstance(self.criterion, tuple(_CLASSES)) or self.criterion in _CLASSES.values()
        return getattr(self.criterion, "class_axis", 1 if of_torch else None)

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch; say how targets have to be that a criterion of torch can't take."""
        try:
            found: Tensor = self.whole(prediction, target)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if reason := self._mistake(prediction, target):
                said = " ".join(str(error).splitlines()[:1])
                raise ConfigError(f"{reason} ({type(error).__name__}: {said:.200})") from error
            raise
        return found

    def _mistake(self, prediction: Any, target: Any) -> str:
        """Return what is wrong with targets that the criterion has refused, and what to type; "" if it isn't known."""
        if not isinstance(prediction, Tensor) or not isinstance(target, Tensor) or prediction.ndim < 2:
            return ""
        found = f"{self.name} is given targets of {shape_of(target)} and outputs of {shape_of(prediction)}"
        if self.kind == "elements" and target.shape != prediction.shape:
            is_column = target.numel() == prediction.numel()
            how = ", so let the data set return y.unsqueeze(-1)" if is_column else ""
            if not target.is_floating_point() and not is_column:
                usual = "loss=cross_entropy" if self.key == "loss" else f"{self.key}=null"
                how = f"; for the numbers of classes, give {usual}"
            return f"{found}: both must have the same shape{how}"
        if self.kind == "elements" and not target.is_floating_point():
            return f"{found}: it takes floats, so let the data set return y.float()"
        if self.kind != "classes":
            return ""
        axis = self.class_axis or 1
        n_classes, wanted, as_torch = prediction.shape[axis], list(prediction.shape), list(prediction.shape)
        del wanted[axis], as_torch[1]
        if list(target.shape) == as_torch != wanted:
            how = "; for axis 1, type loss._target_=torch.nn.CrossEntropyLoss" if self.key == "loss" else ""
            return f"{found}: its classes are the last axis{how}"
        are_shares = target.is_floating_point() and target.shape == prediction.shape
        if are_shares and self.ignore >= 0:
            return f"loss.ignore_index={self.ignore} does not go with targets that are shares: leave it out"
        has_shape = list(target.shape) == wanted
        if not has_shape and target.ndim != prediction.ndim:
            return ""
        how = "y" if has_shape else "y.squeeze(-1)" if list(target.shape) == [*wanted, 1] else "y.argmax(-1)"
        if not has_shape or target.dtype != torch.int64:
            how = how if target.dtype == torch.int64 or how == "y.argmax(-1)" else f"{how}.long()"
            other = "; for numbers that are to be predicted, type task=regression" if target.is_floating_point() else ""
            other = "; loss=cross_entropy takes shares of the classes, too" if are_shares else other
            return f"{found}: it takes class numbers of int64, so let the data set return {how}{other}"
        weight = getattr(self.criterion, "weight", None)
        if isinstance(weight, Tensor) and weight.numel() != n_classes:
            what = f"{self.key}.weight has {weight.numel()} numbers"
            return f"{what}, and the model has {n_classes} classes: give one for each"
        if target.device.type != "cpu":  # after an error, nothing more can be read from the device
            return ""
        wrong = target[((target < 0) | (target >= n_classes)) & (target != self.ignore)]
        if not wrong.numel():
            return ""
        what = f"class {int(wrong.flatten()[0])}, and the model's output has {n_classes} classes, 0 to {n_classes - 1}"
        leave_out = "+loss.ignore_index=<class>" if self.key == "loss" else "task.ignore=<class>"
        return f"the targets hold {what}: give model.num_classes=<n>, or leave it out with {leave_out}"

    def n(self, prediction: Tensor, target: Tensor) -> int | Tensor | None:
        """Return the number of things that the loss is a mean over; None for the samples."""
        if self.kind == "own":
            found: int | Tensor = self.criterion.n(prediction, target)
            return found
        if self.kind == "classes":
            if target.is_floating_point():
                axis = min(self.class_axis or 1, target.ndim - 1)
                return target.numel() // target.shape[axis]
            weights = self.place_weights(target)
            return self.counted(target) if weights is None else weights.sum()
        if self.kind == "rows":
            return prediction.numel() // prediction.shape[-1]
        if self.kind == "elements" and self.reduction != "batchmean":
            return torch.broadcast_shapes(prediction.shape, target.shape).numel()
        rows = getattr(target, "shape", ())[:1]  # a collate may leave samples out
        return rows[0] if rows and rows == prediction.shape[:1] else None

    def counted(self, target: Tensor) -> Tensor:
        """Return the number of class numbers that count."""
        return (target != self.ignore).sum()

    def place_weights(self, target: Tensor) -> Tensor | None:
        """Return what each class number weighs, in float64 and the shape of `target`; None if all weigh alike."""
        weight = self.weight
        if weight is None:
            return None
        counted = target != self.ignore
        return weight.double()[target.long().where(counted, 0)].where(counted, 0.0)


def update_counted(metric: Any, scores: Tensor, target: Tensor, ignore: int) -> None:
    """Give a metric the scores (…, classes) and class numbers (…) that count: (answers, classes) and (answers,).

    Perplexity takes a time axis, and -100 for a class: it gets (1, answers, classes) and (1, answers).
    """
    counted = target != ignore
    places = (None,) if type(metric).__name__ == "Perplexity" else (...,)
    metric.update(scores[counted][places], target[counted][places])


def shape_of(part: Any) -> str:
    """Return the shape and type of a tensor, for messages; the type alone of something else."""
    if not isinstance(part, Tensor):
        return f"of {type(part).__name__}"
    return f"{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"


def takes_class_numbers(criterion: Any) -> bool:
    """Return whether the targets of a criterion are the numbers of classes, which its own forward may change."""
    return callable(criterion) and Counting(criterion).kind == "classes"


def _kind(criterion: Any, options: dict[str, Any]) -> str:
    """Return what a criterion is a mean over: "own", "classes", "elements", "rows"; "" if that is unknown."""
    if callable(n := getattr(criterion, "n", None)) and not isinstance(n, nn.Module):  # a layer may have this name
        return "own"
    for base in type(criterion).__mro__:
        if vars(base).get("counts_classes"):
            own = getattr(base, "forward", None)
            return "classes" if type(criterion).forward is own else ""  # else another loss of a subclass
    for name, known in (("classes", _CLASSES), ("elements", _ELEMENTS), ("rows", _ROWS)):
        for module, function in known.items():
            if criterion is function:
                return "" if function in _WEIGHTED_MEANS and options.get("weight") is not None else name
            if isinstance(criterion, module) and type(criterion).forward is module.forward:
                return name
    return ""
