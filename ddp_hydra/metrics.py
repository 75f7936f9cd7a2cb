"""Loss and accuracy over many steps and all ranks, without waiting for the device at each step."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over samples, and over time where there is one.

    Args:
        logits: (batch, [time,] classes).
        target: (batch, [time]) class numbers.
    """
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


class Meter:
    """Sums of loss and correct answers; the sums stay on the device until they are asked for.

    Args:
        device: of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, target: Tensor) -> None:
        """Count one batch.

        Args:
            loss: mean over the batch.
            logits: (batch, [time,] classes).
            target: (batch, [time]) class numbers.
        """
        n = target.numel()
        correct = (logits.argmax(-1) == target).sum()
        self.sums += torch.stack([loss.double() * n, correct.double(), correct.new_tensor(n).double()])

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
