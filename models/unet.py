"""Defines a small U-Net (Ronneberger et al., 2015)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class UNet(nn.Module):
    """Score the classes of each pixel.

    Args:
        num_classes: number of classes.
        in_channels: channels of an image.
        width: channels at full size; each of the two halvings doubles them.
    """

    def __init__(self, num_classes: int, in_channels: int = 1, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = _block(in_channels, width), _block(width, 2 * width)
        self.bottom = _block(2 * width, 4 * width)
        self.up2, self.up1 = _block(6 * width, 2 * width), _block(3 * width, width)
        self.head = nn.Conv2d(width, num_classes, 1)
        self.smaller, self.larger = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, num_classes, height, width) of images (batch, in_channels, height, width).

        Height and width are multiples of 4.
        """
        first = self.down1(x)
        second = self.down2(self.smaller(first))
        deep = self.bottom(self.smaller(second))
        second = self.up2(torch.cat([second, self.larger(deep)], dim=1))
        return self.head(self.up1(torch.cat([first, self.larger(second)], dim=1)))


def _block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
        *(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
    )
