"""Computes losses of classes, also over time, and of targets that are shares of several classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_hydra.tasks.counting import IGNORED


class CrossEntropy(nn.Module):
    """Mean cross-entropy over samples and, if there is a time axis, over time.

    As torch's, with `weight` it is divided by the sum of the weights of the targets, if these are class numbers.

    Args:
        label_smoothing: share of the target that is spread over all classes (Szegedy et al., 2016), 0..1.
        weight: of each class, (classes,); None: all weigh alike.
        ignore_index: class number that doesn't count.
    """

    weight: Tensor | None
    counts_classes = True  # see `counting`
    class_axis = -1

    def __init__(
        self,
        label_smoothing: float = 0.0,
        weight: Sequence[float] | Tensor | None = None,
        ignore_index: int = IGNORED,
    ) -> None:
        super().__init__()
        self.label_smoothing, self.ignore_index = label_smoothing, ignore_index
        given = weight if weight is None or isinstance(weight, Tensor) else torch.tensor(list(weight))
        self.register_buffer("weight", None if given is None else given.float())

    @property
    def for_validation(self) -> CrossEntropy:
        """The loss without label smoothing."""
        return CrossEntropy(weight=self.weight, ignore_index=self.ignore_index)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss, a scalar.

        Args:
            logits: (batch, [time,] classes).
            target: (batch, [time]) class numbers, or (batch, [time,] classes) shares, as mixup and cutmix make them.

        Raises:
            ValueError: class numbers have an axis too many.
        """
        if target.ndim == logits.ndim and not target.is_floating_point():
            raise ValueError("class numbers have the shape of the logits without the classes' axis")
        options: dict[str, Any] = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        weight = self.weight
        if weight is not None and logits.dtype == torch.float64:
            weight = weight.double()
        if target.is_floating_point():
            return F.cross_entropy(logits.flatten(0, -2), target.flatten(0, -2), weight, **options)
        return F.cross_entropy(logits.flatten(0, -2), target.flatten(), weight, **options)
