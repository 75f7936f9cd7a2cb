"""The buckets in which DDP sums gradients: laid out once, so that sums come out the same after a restart."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Touch(nn.Module):
    """Gives every parameter a gradient of nothing, the last parameter's first.

    Args:
        model: whose parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        """Return a scalar."""
        return torch.stack([(part * 0).sum() for part in self.model.parameters() if part.requires_grad]).sum()


def prebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Have DDP lay out its buckets for good before the first step, not after it.

    Where a gradient lies in its bucket decides in which order more than two ranks' are summed. After a restart the
    next step shall sum as it would have without.
    """
    model = ddp.module
    if dist.get_world_size() > 2 and not has_sparse(model):
        ddp.module = Touch(model)
        ddp().backward()
        ddp.module = model
        ddp.zero_grad(set_to_none=True)


def has_sparse(model: nn.Module) -> bool:
    """Whether a layer has gradients that name the rows they are of."""
    return any(getattr(part, "sparse", False) for part in model.modules())
