"""Types with limits, for what ranks, files and the network send. msgspec checks that a value is of such a type."""

from __future__ import annotations

import math
import sys
from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Neither NaN nor infinite: JSON cannot hold these."""
NonNegative = Annotated[float, Meta(ge=0, lt=2**63)]
Time = Annotated[float, Meta(ge=0, lt=1e11)]
"""In seconds since 1970."""
Name = Annotated[str, Meta(pattern=r"\A[^\ud800-\udfff]+\Z")]
"""Has no lone surrogates: JSON can hold them, but no file can."""


def finite_number(value: object) -> float | None:
    """Return a value that is a finite number; None for all else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def prepare(*kinds: type) -> None:
    """Have msgspec read the annotations of structs, as it does where one is decoded for the first time.

    If two threads do so at the same time, the process crashes (a segmentation fault, msgspec 0.22).
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
