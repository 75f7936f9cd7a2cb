"""Computes losses of classes, also over time, and of targets that are shares of several classes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class CrossEntropy:
    """Mean cross-entropy over samples and, if there is a time axis, over time.

    Args:
        label_smoothing: share of the target that is spread over all classes (Szegedy et al., 2016), 0..1.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    @property
    def for_validation(self) -> CrossEntropy:
        """The loss without label smoothing."""
        return CrossEntropy()

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss, a scalar.

        Args:
            logits: (batch, [time,] classes).
            target: (batch, [time]) class numbers, or (batch, [time,] classes) shares, as mixup and cutmix make them.
        """
        shares = target.is_floating_point()
        target = target.flatten(0, -2) if shares else target.flatten()
        return F.cross_entropy(logits.flatten(0, -2), target, label_smoothing=self.label_smoothing)
