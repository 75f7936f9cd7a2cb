"""Loss and accuracy over many steps and all ranks, without waiting for the device at each step.

There is an accuracy where there are classes: the target holds their numbers, or the loss takes shares of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Count(NamedTuple):
    """Sums over one batch.

    Args:
        sums: of the loss, and of the correct answers; float64 (2,) on the device.
        n: targets.
        n_classified: of these, those that are classes.
    """

    sums: Tensor
    n: int
    n_classified: int


@torch.no_grad()
def count(loss: Tensor, output: Tensor, target: Tensor, class_axis: int | None = -1) -> Count:
    """Count one batch.

    Args:
        loss: mean over the batch.
        output: of the model.
        target: class numbers, in the shape of `output` without its axis of classes; shares of classes, in its shape,
            of which the largest counts; or anything else, which has no accuracy.
        class_axis: of `output`; None where the loss knows no classes, so that a target of its shape is no shares.
    """
    pair = classes(output, target, class_axis)
    if pair is None:
        return Count(torch.stack([loss.double() * target.numel(), torch.zeros_like(loss).double()]), target.numel(), 0)
    guess, truth = pair
    n = truth.numel()
    return Count(torch.stack([loss.double() * n, (guess == truth).sum().double()]), n, n)


def classes(output: Tensor, target: Tensor, class_axis: int | None) -> tuple[Tensor, Tensor] | None:
    """Return the classes that were guessed and the true ones; None where the target is no classes. See `count`."""
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
    """Sums of loss and correct answers; they stay on the device until they are asked for.

    Args:
        device: of the output.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.n = self.n_classified = 0

    def add(self, *counts: Count) -> None:
        """Count batches; see `count`."""
        for one in counts:
            self.sums += one.sums
            self.n += one.n
            self.n_classified += one.n_classified

    def take(self) -> list[float]:
        """Give the sums of this rank since the last time away, and begin anew."""
        sums = [*self.sums.tolist(), float(self.n), float(self.n_classified)]
        self.clear()
        return sums

    def result(self, prefix: str) -> dict[str, float]:
        """Mean loss and top-1 accuracy over all ranks since the last time. A collective: all ranks call it."""
        mine = torch.tensor(self.take(), dtype=torch.float64, device=self.sums.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(mine)
        return means(prefix, [mine.tolist()])

    def clear(self) -> None:
        """Forget what was counted."""
        self.sums.zero_()
        self.n = self.n_classified = 0


def means(prefix: str, sums: Iterable[Sequence[float]]) -> dict[str, float]:
    """Mean loss and accuracy of some sums, as of each rank; none where nothing was counted, or no classes."""
    loss, correct, n, n_classified = (sum(column) for column in zip(*sums, strict=True))
    accuracy = {f"{prefix}/accuracy": correct / n_classified} if n_classified else {}
    return {f"{prefix}/loss": loss / n, **accuracy} if n else {}
