"""Sends the tensors of a model that torch's collectives can't send as they are: their types, or their layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

SENT = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}
"""Types that gloo and NCCL both send."""


def can_be_sent(tensor: Tensor) -> bool:
    """Return whether a collective takes a tensor as it is. int16, float8, expanded and sparse ones it does not."""
    return tensor.dtype in SENT and tensor.layout is torch.strided and not overlaps(tensor)


def overlaps(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after `expand`."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > span


def left_out(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers and frozen parameters of a module that DDP can't send, by their names."""
    frozen = [(name, value) for name, value in module.named_parameters() if not value.requires_grad]
    return {name: value for name, value in [*module.named_buffers(), *frozen] if not can_be_sent(value)}


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Give all ranks the tensors of rank 0; those of a type that is not sent go as bytes. A collective.

    Sparse tensors stay as they are: all ranks have built the same, and no layer changes them in place.
    """
    for tensor in tensors:
        if can_be_sent(tensor):
            dist.broadcast(tensor, src=0)
        elif tensor.layout is torch.strided and not overlaps(tensor):
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            dist.broadcast(content, src=0)
            tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))
