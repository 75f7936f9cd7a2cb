"""Loss and accuracy over many steps and all ranks, without waiting for the device at each step."""

from __future__ import annotations

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
    return torch.stack([loss.double() * n, correct.double(), correct.new_tensor(n).double()])


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

    def result(self, prefix: str) -> dict[str, float]:
        """Mean loss and top-1 accuracy over all ranks since the last call. A collective: all ranks call it."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.sums)
        loss, correct, n = self.sums.tolist()
        self.clear()
        return {f"{prefix}/loss": loss / n, f"{prefix}/accuracy": correct / n} if n else {}

    def clear(self) -> None:
        """Forget what was counted."""
        self.sums.zero_()
