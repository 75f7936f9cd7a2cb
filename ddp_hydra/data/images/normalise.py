"""Normalises images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Normalise:
    """Subtracts a mean from each channel, and divides by a standard deviation.

    Args:
        mean: (3,), 0..1.
        std: (3,), 0..1.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = mean, std
        self._rows: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise images on their device.

        Args:
            images: uint8 (batch, 3, height, width), in any memory format.

        Returns:
            float32 of the same shape and memory format.
        """
        width = images.shape[-1]
        rows = images.permute(0, 2, 3, 1)
        if not rows.is_contiguous():
            mean, scale = self._constants(images.device, 1)
            return images.float().sub_(mean.view(1, 3, 1, 1)).mul_(scale.view(1, 3, 1, 1))
        # Compute whole rows of pixels at a time, because vectors of three are slow on a CPU.
        mean, scale = self._constants(images.device, width)
        rows = rows.reshape(-1, width * 3).float().sub_(mean).mul_(scale)
        return rows.view(-1, images.shape[2], width, 3).permute(0, 3, 1, 2)

    def _constants(self, device: torch.device, width: int) -> tuple[Tensor, Tensor]:
        """Return mean and 1/std for the bytes of a row of pixels, (3 * width,) each."""
        if (device, width) not in self._rows:
            mean = torch.tensor(self.mean, device=device) * 255
            scale = 1 / (torch.tensor(self.std, device=device) * 255)
            self._rows[device, width] = mean.repeat(width), scale.repeat(width)
        return self._rows[device, width]
