"""Makes a data set of scikit-learn's diabetes study (Efron et al., 2004): 442 patients, 10 measurements of each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Diabetes(Dataset):
    """Measurements of patients, and the progression of their disease a year later.

    Both are standardised with the training patients' mean and deviation.

    Args:
        split: "train", or "val": every fifth patient.

    Raises:
        ValueError: there is no such split.
        ImportError: scikit-learn is missing.
    """

    thread_safe = True

    def __init__(self, split: str = "train") -> None:
        if split not in ("train", "val"):
            raise ValueError(f"split is {split!r}, and must be train or val")
        try:
            from sklearn.datasets import load_diabetes
        except ModuleNotFoundError:
            raise ImportError("the table comes with scikit-learn: type pip install 'ddp-hydra[demo]'") from None
        table, progression = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
        is_val = torch.arange(len(table)) % 5 == 0
        chosen = is_val if split == "val" else ~is_val
        self.measurements, self.progression = (
            ((part - part[~is_val].mean(0)) / part[~is_val].std(0))[chosen] for part in (table, progression)
        )

    def __len__(self) -> int:
        return len(self.progression)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return measurements (10,) and the progression ()."""
        return self.measurements[index], self.progression[index]
