"""Splits a data set by a hash of each sample's name, so that the part kept for validation is the same everywhere."""

from __future__ import annotations

import hashlib


def check(holdout: float, split: str) -> None:
    """Check the arguments of a split.

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
    """Return whether a sample with this name belongs to a split; the arguments are those of `check`."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    is_held_out = int.from_bytes(digest[:8], "big") < holdout * 2**64
    return is_held_out == (split == "val")
