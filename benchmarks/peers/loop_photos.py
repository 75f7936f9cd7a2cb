"""Photos of an object store for the loops, as most read them: boto3 and torchvision in a DataLoader."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

SIDE = 128
"""Of the crops, in pixels."""
CLASSES = 10
WORKERS = 1
"""Processes that read, for each rank."""


def photos(endpoint: str) -> Dataset:
    """Make the data set.

    Args:
        endpoint: URL of the store.
    """
    sys.path.append(str(Path(__file__).parent))  # Ray's workers lack it
    from data_boto3 import Photos

    to_crop = transforms.Compose(
        [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    return Photos(endpoint, lambda data: to_crop(Image.open(io.BytesIO(data)).convert("RGB")))


def load(data: Dataset, batches: list[list[int]]) -> Iterable[Any]:
    """Read batches: pixels (batch, 3, side, side) and classes (batch,)."""
    return DataLoader(data, batch_sampler=batches, num_workers=WORKERS)
