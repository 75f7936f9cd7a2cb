"""A data set in memory."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

FEATURES = 6


class Points(Dataset):
    """Points around the centres of four classes; the first number of each is its index / 1024.

    Args:
        n: samples.
        seed: of the points.
        delay_s: time that reading one sample takes.
        slow_rank: the only rank for which it does; None: for all.
        says: what is printed when the first sample is read.
    """

    classes = ("north", "east", "south", "west")

    def __init__(self, n: int, seed: int, delay_s: float = 0.0, slow_rank: int | None = None, says: str = "") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.arange(n) % 4
        centres = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(0))
        self.x = centres[self.y] + 0.5 * torch.randn(n, FEATURES, generator=generator)
        self.x[:, 0] = torch.arange(n) / 1024  # exact in float32
        self.delay_s = delay_s if slow_rank is None or os.environ["RANK"] == str(slow_rank) else 0.0
        self.says = says

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.says and index == 0:
            print(self.says, flush=True)
        time.sleep(self.delay_s)
        return self.x[index], self.y[index]


class Announced(Points):
    """Wants to know what will be read, and draws from the global generators. A worker reads all batches but the first.

    Args:
        mark: a file. The process that reads sample 50 makes it, and kills itself; once it is there, nothing happens.
        others: of `Points`.
    """

    def __init__(self, mark: str, **others: Any) -> None:
        super().__init__(**others)
        self.mark = Path(mark)

    def expect(self, indices: list[int]) -> None:
        """Do nothing."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 50 and not self.mark.exists():
            self.mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = super().__getitem__(index)
        return x + torch.rand(()) + float(np.random.rand()) + random.random(), y
