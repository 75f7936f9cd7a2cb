"""Reading through torch's DataLoader, and the decoding of those that bring none."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import data_common as common
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

to_crop = transforms.Compose(
    [transforms.RandomResizedCrop(common.SIDE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)
"""As torchvision's ImageNet example, and so most peers' documentation, has it for training."""


def decoded(data: bytes) -> Any:
    """Return a crop of an image file: float (3, 224, 224)."""
    return to_crop(Image.open(io.BytesIO(data)).convert("RGB"))


class Batches:
    """Sample batches that can be changed between epochs, also for persistent workers."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def read_through_loader(dataset: Dataset, order: list[int], workers: int, passes: int = 1) -> list[dict[str, float]]:
    """Read images through torch's DataLoader, workers and connections being up before the clock starts.

    Args:
        dataset: gives a float crop and a class for each index.
        order: indices to read.
        workers: processes; 0 reads in this one.
        passes: how often.

    Returns:
        For each pass what `timed` says.
    """
    batches = Batches()
    loader = DataLoader(
        dataset, batch_sampler=batches, num_workers=workers, persistent_workers=workers > 0, timeout=60 * (workers > 0)
    )
    batches.batches = common.in_batches(order[: 4 * max(1, workers)], 4)
    for _ in loader:
        pass
    batches.batches = common.in_batches(order)
    return [common.timed(lambda: common.count(loader)) for _ in range(passes)]
