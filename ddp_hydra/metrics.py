"""Loss and accuracy over many steps and all ranks, without waiting for the device at each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def count(loss: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    """Count one batch: sum of the loss, correct answers, and how many there are; float64 (3,) on the device.

    Args:
        loss: mean over the batch.
        logits: (batch, [time,] classes).
        target: (batch, [time]) class numbers, or (batch, [time,] classes) shares, of which the largest counts.
    """
    if target.is_floating_point():
        target = target.argmax(-1)
    n = target.numel()
    correct = (logits.argmax(-1) == target).sum()
    # `full` is made on the device: a number that is sent there would wait for all work before it.
    return torch.stack([loss.double() * n, correct.double(), torch.full_like(correct, n, dtype=torch.float64)])


class Meter:
    """Sums of loss and correct answers; the sums stay on the device until they are asked for.

    Args:
        device: of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, *counts: Tensor) -> None:
        """Count batches; see `count`."""
        for one in counts:
            self.sums += one

    def take(self) -> list[float]:
        """Give the sums of this rank since the last time away, and begin anew."""
        sums = self.sums.tolist()
        self.clear()
        return sums

    def result(self, prefix: str) -> dict[str, float]:
        """Mean loss and top-1 accuracy over all ranks since the last time. A collective: all ranks call it."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.sums)
        return means(prefix, [self.take()])

    def clear(self) -> None:
        """Forget what was counted."""
        self.sums.zero_()


def means(prefix: str, sums: Iterable[Sequence[float]]) -> dict[str, float]:
    """Mean loss and accuracy of some sums, as of each rank; nothing where none has counted anything."""
    loss, correct, n = (sum(column) for column in zip(*sums, strict=True))
    return {f"{prefix}/loss": loss / n, f"{prefix}/accuracy": correct / n} if n else {}
