"""A part of a data set that is kept for validation: chosen by a hash of each name, so it is the same everywhere."""

from __future__ import annotations

import hashlib


def check(holdout: float, split: str) -> None:
    """Refuse what is no share, or no split.

    Args:
        holdout: share of the distinct names that is kept for validation, 0..1.
        split: "train" or "val".

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 0 <= holdout < 1:
        raise ValueError(f"holdout is {holdout}, and is a share from 0 to below 1: type data.holdout=0.1")
    if split not in ("train", "val"):
        raise ValueError(f"split is {split!r}, and is train or val")


def is_of(name: str, holdout: float, split: str) -> bool:
    """Whether a sample of this name is of a split; arguments as of `check`."""
    digest = hashlib.sha256(name.encode()).digest()
    is_held_out = int.from_bytes(digest[:8], "big") < holdout * 2**64
    return is_held_out == (split == "val")
