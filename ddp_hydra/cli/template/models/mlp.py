"""Defines a small fully connected network."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Classify points.

    Args:
        num_classes: width of the last layer.
        width: of each hidden layer.
        depth: number of hidden layers.
    """

    def __init__(self, num_classes: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        sizes = [2, *[width] * depth]
        hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], num_classes))

    def forward(self, points: Tensor) -> Tensor:
        """Return the logits (batch, num_classes) of points (batch, 2)."""
        return self.layers(points)
