"""Normalises images."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract a mean from each channel, and divide by a standard deviation, on the device of the images.

    Args:
        images: uint8 (batch, 3, height, width), in any memory format.
        mean: (3,), 0..1.
        std: (3,), 0..1.

    Returns:
        float32 of the same shape and memory format.
    """
    width = images.shape[-1]
    rows = images.permute(0, 2, 3, 1)
    if not rows.is_contiguous():
        offset, scale = _constants(mean, std, images.device, 1)
        return images.float().sub_(offset.view(1, 3, 1, 1)).mul_(scale.view(1, 3, 1, 1))
    # Compute whole rows of pixels at a time, because vectors of three are slow on a CPU.
    offset, scale = _constants(mean, std, images.device, width)
    rows = rows.reshape(-1, width * 3).float().sub_(offset).mul_(scale)
    return rows.view(-1, images.shape[2], width, 3).permute(0, 3, 1, 2)


@lru_cache(maxsize=64)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, width: int
) -> tuple[Tensor, Tensor]:
    """Return mean and 1/std for the bytes of a row of pixels, (3 * width,) each."""
    scale = 1 / (torch.tensor(std, device=device) * 255)
    return (torch.tensor(mean, device=device) * 255).repeat(width), scale.repeat(width)
