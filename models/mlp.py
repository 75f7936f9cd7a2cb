"""Defines a small fully connected network."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Computes scores or numbers from features.

    Args:
        in_features: size of a sample, flattened.
        num_classes: width of the last layer.
        width: of each hidden layer.
        depth: number of hidden layers.
        dropout: probability that a hidden value is dropped in training, 0..1.
    """

    def __init__(
        self, in_features: int, num_classes: int, width: int = 64, depth: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        sizes = [in_features, *[width] * depth]
        hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout)) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, num_classes) for x (batch, ...)."""
        return self.layers(x)
