"""A model of images that is quick and has no BatchNorm."""

from __future__ import annotations

from torch import Tensor, nn


class Pixels(nn.Module):
    """One layer over a small picture of the picture.

    Args:
        num_classes: what comes out.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Predict the class of each image."""
        return self.layers(x)
