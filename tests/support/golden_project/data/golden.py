"""Data sets of the golden jobs. They draw nothing from global generators, and import nothing of ddp_hydra."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from data.digits import Digits

LENGTH = 8
IGNORED = -100


class Sentences(Dataset):
    """Windows of characters with the character after each.

    Args:
        split: "train" or "val".
        padded: only the first 1 to 8 characters of a window count.
    """

    num_classes = 20

    def __init__(self, split: str, padded: bool) -> None:
        draws = torch.Generator().manual_seed(len(split))
        n_samples = 410 if split == "train" else 90
        steps = torch.randint(1, 4, (n_samples, LENGTH + 1), generator=draws)
        self.text = steps.cumsum(1) % self.num_classes
        lengths = torch.randint(1, LENGTH + 1, (n_samples,), generator=draws)
        self.lengths = lengths if padded else torch.full_like(lengths, LENGTH)

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one-hot characters, (8, 20), and the ones after them, (8,)."""
        text = self.text[index]
        counts = torch.arange(LENGTH) < self.lengths[index]
        return F.one_hot(text[:-1], self.num_classes).float(), text[1:].where(counts, IGNORED)


class DigitStream(IterableDataset):
    """Digits in another order in each epoch.

    Args:
        split: "train" or "val".
    """

    num_classes = 10

    def __init__(self, split: str) -> None:
        self.digits, self.epoch = Digits(split), 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.digits)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        draws = torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(len(self.digits), generator=draws).tolist():
            yield self.digits[index]
