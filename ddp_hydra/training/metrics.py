"""Counts loss and accuracy over many steps and all ranks, without waiting for the device at each step.

There is an accuracy if there are classes: the target holds their numbers, or the loss takes shares of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Count(NamedTuple):
    """The sums of one batch.

    Args:
        sums: (2,) float64 on the device: the sum of the loss and the number of correct answers.
        n: number of targets.
        n_classified: number of targets that are classes.
    """

    sums: Tensor
    n: int
    n_classified: int


@torch.no_grad()
def count(loss: Tensor, output: Tensor, target: Tensor, class_axis: int | None = -1) -> Count:
    """Return the sums of one batch.

    Args:
        loss: mean over the batch, a scalar.
        output: the model's output.
        target: class numbers, in the shape of `output` without its class axis; or shares of classes, in the shape of
            `output`, of which the largest counts; or anything else, which has no accuracy.
        class_axis: the axis of `output` that holds classes; None if the loss knows no classes: then a target in the
            shape of `output` does not hold shares.
    """
    pair = classes(output, target, class_axis)
    if pair is None:
        return Count(torch.stack([loss.double() * target.numel(), torch.zeros_like(loss).double()]), target.numel(), 0)
    guess, truth = pair
    n = truth.numel()
    return Count(torch.stack([loss.double() * n, (guess == truth).sum().double()]), n, n)


def classes(output: Tensor, target: Tensor, class_axis: int | None) -> tuple[Tensor, Tensor] | None:
    """Return the predicted and the true classes; None if the target holds no classes. See `count`."""
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


class Meter:
    """Adds up loss and correct answers. The sums stay on the device until they are asked for.

    Args:
        device: of the model's output.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.n = self.n_classified = 0

    def add(self, *counts: Count) -> None:
        """Add the sums of batches; see `count`."""
        for one in counts:
            self.sums += one.sums
            self.n += one.n
            self.n_classified += one.n_classified

    def take(self) -> list[float]:
        """Return this rank's sums since the last call, and start from zero. Wait for the device."""
        sums = [*self.sums.tolist(), float(self.n), float(self.n_classified)]
        self.clear()
        return sums

    def result(self, prefix: str) -> dict[str, float]:
        """Return mean loss and top-1 accuracy over all ranks since the last call. A collective."""
        sums = torch.tensor(self.take(), dtype=torch.float64, device=self.sums.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        return means(prefix, [sums.tolist()])

    def clear(self) -> None:
        """Start from zero."""
        self.sums.zero_()
        self.n = self.n_classified = 0


def means(prefix: str, sums: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return mean loss and accuracy. Without targets there is no loss, without classes no accuracy.

    Args:
        prefix: of the metrics' names.
        sums: (loss, correct answers, targets, targets that are classes) of each rank.
    """
    loss, correct, n, n_classified = (sum(column) for column in zip(*sums, strict=True))
    accuracy = {f"{prefix}/accuracy": correct / n_classified} if n_classified else {}
    return {f"{prefix}/loss": loss / n, **accuracy} if n else {}
