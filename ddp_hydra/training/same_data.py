"""Compares the data sets of all ranks: where each has split them anew, one trains on what another validates on."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from typing import Any

from ddp_hydra.data import draws, wrappers
from ddp_hydra.data.summary import alike, summary
from ddp_hydra.errors import DataError
from ddp_hydra.training.consensus import gather_objects

IDS = 64
"""Samples whose ids are compared."""
READ_S = 0.1
"""Seconds that reading samples may take; a slower data set without ids is compared by its length alone."""


def check(data: Any, key: str, seed: int) -> None:
    """Refuse to go on where the ranks have different data. A collective.

    Args:
        data: a map-style data set.
        key: of the config, for the message.
        seed: of the run.

    Raises:
        DataError: the ranks have different data.
    """
    lengths: list[int] = gather_objects(len(data))
    name = wrappers.name_of(data)
    how = "build it from the arguments and the global random generators alone, which all ranks have alike"
    if len(set(lengths)) > 1:
        raise DataError(f"{key}: {name} has {', '.join(f'{n:,}' for n in lengths)} samples on the ranks: {how}")
    if not lengths[0]:
        return
    found = gather_objects(fingerprint(data, seed))
    for rank, other in enumerate(found):
        if not all(alike(a, b) for a, b in zip(found[0], other, strict=False)):
            raise DataError(
                f"{key}: {name} has other samples on rank {rank} than on rank 0, as if each had split it anew: {how}"
            )


def fingerprint(data: Any, seed: int) -> list[Any]:
    """Return what tells a data set from another one of its length: ids of samples, or two samples."""
    n = len(data)
    if hasattr(data, "sample_id"):
        places = sorted({n * number // IDS for number in range(min(IDS, n))})
        return [hashlib.sha256("\n".join(str(data.sample_id(place)) for place in places).encode()).hexdigest()]
    samples: list[Any] = []
    begin = time.monotonic()
    for index in (0, n // 2):
        with suppress(Exception), draws.Kept():  # an error comes again where the sample is trained on
            twice = []
            for _ in range(2):
                indices = draws.placed([index], seed)
                indices.seed_sample(0)
                twice.append(summary(data[index]))
            samples.append(twice[0] if alike(*twice) else None)
        if time.monotonic() - begin > READ_S:
            break
    return samples
