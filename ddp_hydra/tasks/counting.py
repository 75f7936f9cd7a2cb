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
        note: says for the header by what it is weighed if what it is a mean over can't be told; else "".

    Raises:
        ConfigError: the criterion returns a loss for each sample, or its means can't be put together.
    """

    def __init__(self, criterion: Callable[..., Any]) -> None:
        function: Any = criterion
        self.options: dict[str, Any] = {}
        while isinstance(function, partial):
            function, self.options = function.func, {**function.keywords, **self.options}
        self.criterion: Any = function
        self.kind = _kind(function, self.options)
        self.ignore = int(self._option("ignore_index", IGNORED))
        self.reduction = self._option("reduction", "mean")
        self.summed = self.reduction == "sum"
        name = getattr(function, "__name__", type(function).__name__)
        if self.reduction == "none":
            raise ConfigError(f"loss.reduction=none of {name} gives a loss for each sample: give mean or sum")
        smoothing, weight = self._option("label_smoothing", 0.0), self.weight
        if weight is not None and smoothing and not self.summed and bool((weight == 0).any()):
            raise ConfigError(
                f"{name} with label_smoothing={smoothing} and a class of weight 0 has no mean over a batch of "
                "that class alone: leave the class out by ignore_index, or give label_smoothing=0"
            )
        known = self.kind or self.summed
        self.note = "" if known else f"{name} by samples; a method n(prediction, target) of it may say otherwise"

    def _option(self, name: str, default: Any) -> Any:
        found = self.options.get(name, getattr(self.criterion, name, None))
        return default if found is None else found

    @property
    def weight(self) -> Tensor | None:
        """The weights of the classes, (classes,), by whose sum the loss is divided; None for none."""
        found = self._option("weight", None) if self.kind == "classes" else None
        return found if isinstance(found, Tensor) else None

    def n(self, prediction: Tensor, target: Tensor) -> int | Tensor | None:
        """Return the number of things that the loss is a mean over; None for the samples."""
        if self.kind == "own":
            found: int | Tensor = self.criterion.n(prediction, target)
            return found
        if self.kind == "classes":
            if target.is_floating_point():
                axis = min(int(getattr(self.criterion, "class_axis", 1)), target.ndim - 1)
                return target.numel() // target.shape[axis]
            weights = self.place_weights(target)
            return self.counted(target) if weights is None else weights.sum()
        if self.kind == "rows":
            return prediction.numel() // prediction.shape[-1]
        if self.kind == "elements" and self.reduction != "batchmean":
            return torch.broadcast_shapes(prediction.shape, target.shape).numel()
        return None

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


def _kind(criterion: Any, options: dict[str, Any]) -> str:
    """Return what a criterion is a mean over: "own", "classes", "elements", "rows"; "" if that is unknown."""
    if callable(getattr(criterion, "n", None)):
        return "own"
    if getattr(criterion, "counts_classes", False):
        return "classes"
    for name, known in (("classes", _CLASSES), ("elements", _ELEMENTS), ("rows", _ROWS)):
        for module, function in known.items():
            if criterion is function:
                return "" if function in _WEIGHTED_MEANS and options.get("weight") is not None else name
            if isinstance(criterion, module) and type(criterion).forward is module.forward:
                return name
    return ""
