"""Lays out DDP's gradient buckets once, so that gradients are summed in the same order after a restart."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ZeroGradients(nn.Module):
    """Gives every parameter of a model a gradient of zero, the last parameter first.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        """Return a scalar that depends on every trained parameter."""
        trained = (part for part in self.model.parameters() if part.requires_grad)
        return torch.stack([(_real(part) * 0).sum() for part in trained]).sum()


def _real(parameter: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(parameter) if parameter.is_complex() else parameter


def prebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Make DDP lay out its final buckets before the first step, not after it.

    With more than two ranks, a gradient's place in its bucket decides the order of the sum. A restarted run has to sum
    as it would have without the restart.
    """
    model = ddp.module
    if dist.get_world_size() > 2 and not has_sparse(model):
        ddp.module = ZeroGradients(model)
        ddp().backward()
        ddp.module = model
        ddp.zero_grad(set_to_none=True)


def has_sparse(model: nn.Module) -> bool:
    """Return whether a layer has sparse gradients."""
    return any(getattr(part, "sparse", False) is True for part in model.modules())
