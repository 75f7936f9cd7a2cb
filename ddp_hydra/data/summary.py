"""Tells by a few values whether two samples are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

VALUES = 32
"""Values of a tensor that are compared."""


def summary(sample: Any) -> Any:
    """Return a sample as plain values: a few numbers of each tensor."""
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        flat = torch.as_tensor(sample).detach().reshape(-1)
        chosen = flat[:: max(1, len(flat) // VALUES)][:VALUES]
        numbers = torch.view_as_real(chosen) if chosen.is_complex() else chosen
        return [tuple(sample.shape), numbers.reshape(-1).double().tolist()]
    if isinstance(sample, Mapping):
        return [[str(name), summary(part)] for name, part in sample.items()]
    if isinstance(sample, (list, tuple)):
        return [summary(part) for part in sample]
    if isinstance(sample, (bool, int, float, np.number)):
        return float(sample)
    return str(sample) if isinstance(sample, (str, bytes)) else None


def alike(a: Any, b: Any) -> bool:
    """Return whether two summaries are equal but for rounding; None stands for what can't be compared."""
    if a is None or b is None:
        return True
    if isinstance(a, float) and isinstance(b, float):
        return bool(np.isclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(alike(one, other) for one, other in zip(a, b, strict=True))
    return bool(a == b)
