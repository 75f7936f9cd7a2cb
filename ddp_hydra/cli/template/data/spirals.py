"""Makes points on spirals: a data set that needs no files."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset):
    """Points in the plane; the class of each is the arm of the spiral that it is on.

    Args:
        n: number of points.
        num_classes: number of arms.
        noise: standard deviation of what is added to each coordinate.
        seed: another seed gives other points.
    """

    def __init__(self, n: int, num_classes: int = 3, noise: float = 0.03, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.num_classes = num_classes
        self.labels = torch.randint(num_classes, (n,), generator=random)
        radius = torch.rand(n, generator=random)
        angle = 2 * torch.pi * (self.labels / num_classes + 0.75 * radius)
        points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        self.points = points + noise * torch.randn(n, 2, generator=random)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a point (2,) and its class ()."""
        return self.points[index], self.labels[index]
