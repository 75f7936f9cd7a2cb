"""Makes data sets of scikit-learn's 1,797 handwritten digits: images of 8x8 pixels, which need no download."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset


class Digits(Dataset):
    """Images of digits with the digit that each shows.

    Args:
        split: "train", or "val": every fifth image.

    Attributes:
        images: float32 (n, 1, 8, 8), 0..1.
        labels: int64 (n,), 0..9.

    Raises:
        ValueError: there is no such split.
        ImportError: scikit-learn is missing.
    """

    thread_safe = True
    num_classes = 10

    def __init__(self, split: str = "train") -> None:
        if split not in ("train", "val"):
            raise ValueError(f"split is {split!r}, and must be train or val")
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError:
            raise ImportError("the digits come with scikit-learn: type pip install 'ddp-hydra[demo]'") from None
        found = load_digits()
        is_val = torch.arange(len(found.target)) % 5 == 0
        chosen = is_val if split == "val" else ~is_val
        self.images = torch.tensor(found.images, dtype=torch.float32)[chosen, None] / 16
        self.labels = torch.tensor(found.target)[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image (1, 8, 8) and its digit ()."""
        return self.images[index], self.labels[index]


class DigitMasks(Digits):
    """Images of digits with masks for segmentation: a pixel is background, 0, or part of a digit, 1..10.

    Args:
        split: as of `Digits`.
        size: height and width that the images are enlarged to, in pixels.
        threshold: a pixel that is brighter is part of the digit, 0..1.
    """

    thread_safe = True
    num_classes = 11

    def __init__(self, split: str = "train", size: int = 16, threshold: float = 0.3) -> None:
        super().__init__(split)
        self.images = F.interpolate(self.images, size=(size, size), mode="bilinear", align_corners=False)
        self.masks = torch.where(self.images[:, 0] > threshold, self.labels[:, None, None] + 1, 0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image (1, size, size) and its mask (size, size)."""
        return self.images[index], self.masks[index]


class DigitTokens(Digits):
    """Digits as sequences of 64 tokens, in dicts as Hugging Face's models take them.

    Args:
        split: as of `Digits`.
    """

    thread_safe = True
    num_tokens = 17

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        """Return input_ids (64,), of 0..16; attention_mask (64,), 1 where there is ink; labels ()."""
        tokens = (self.images[index].flatten() * 16).round().long()
        return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": self.labels[index]}
