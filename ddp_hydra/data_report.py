"""What reading the data costs a run, over all ranks.

A data set may tell what it has cost its process so far with `stats()`, a dict of rising numbers. Those that are known
here: samples (read), bytes, requests, retries, cache_hits and cache_misses (of samples or of shards), bad_samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_hydra.errors import DataError
from ddp_hydra.loader import Loader

COUNTS = ("samples", "bytes", "requests", "retries", "cache_hits", "cache_misses", "bad_samples")


class DataReport:
    """Adds up what the loaders of all ranks waited and their data sets read.

    Args:
        loader: of the training data.
        device: for the collectives.
    """

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader = loader
        self.device = device
        self.before = [0.0] * (2 + len(COUNTS))
        self.spent_s = 0.0

    def lap(self, spent_s: float) -> dict[str, float]:
        """What the time since the last lap was like. A collective: all ranks call it.

        Args:
            spent_s: length of the lap, without validation, in seconds.

        Raises:
            DataError: all ranks together found too many bad samples.
        """
        self.spent_s += spent_s
        now = self._over_all_ranks()
        waited, spent, *counts = (a - b for a, b in zip(now, self.before, strict=True))
        new, so_far = (dict(zip(COUNTS, numbers, strict=True)) for numbers in (counts, now[2:]))
        self.before = now
        lap = {"data_wait": waited / max(spent, 1e-9)}
        if not hasattr(self.loader.dataset, "stats"):
            return lap
        if so_far["bad_samples"]:
            self._refuse_too_many()
        lap["data/bytes_per_s"] = new["bytes"] / max(spent, 1e-9) * self._ranks()
        lap["data/cache_hits"] = new["cache_hits"] / max(1, new["cache_hits"] + new["cache_misses"])
        return lap | {f"data/{name}": so_far[name] for name in ("retries", "bad_samples")}

    def total(self) -> dict[str, float]:
        """What the run was like as a whole, for its summary; as of the last lap."""
        waited, spent, *counts = self.before
        total = {"wait_s": waited / self._ranks(), "wait": waited / max(spent, 1e-9)}
        return total | (dict(zip(COUNTS, counts, strict=True)) if hasattr(self.loader.dataset, "stats") else {})

    def _over_all_ranks(self) -> list[float]:
        stats = self.loader.dataset.stats() if hasattr(self.loader.dataset, "stats") else {}
        mine = [self.loader.waited_s, self.spent_s, *(float(stats.get(name, 0)) for name in COUNTS)]
        if self._ranks() == 1:
            return mine
        sums = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return sums.tolist()

    def _refuse_too_many(self) -> None:
        """Fail where the ranks together are past what each of them may have."""
        dataset = self.loader.dataset
        share = getattr(dataset, "max_bad_fraction", None)
        if share is None:
            return
        bad = bad_of_all_ranks(dataset)
        if count_bad(bad) > share * len(dataset):
            some = "; ".join(f"{name} ({bad[name].reason})" for name in sorted(bad)[:3])
            raise DataError(
                f"all ranks together found {count_bad(bad)} bad samples of {len(dataset)}, and data.max_bad_fraction="
                f"{share:g} allows {int(share * len(dataset))}: {some}. Remove them, or type a larger "
                "data.max_bad_fraction=..."
            )

    def _ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1


@dataclass(frozen=True)
class Bad:
    """What is wrong with a sample, or with a shard of them.

    Args:
        reason: why it was replaced.
        count: samples that it means.
    """

    reason: str
    count: int = 1


def bad_of_all_ranks(*datasets: Any) -> dict[str, Bad]:
    """{name: what is wrong} of the samples that any rank replaced. A collective."""
    mine = {
        name: Bad(reason, getattr(data, "bad_counts", {}).get(name, 1))
        for data in datasets
        for name, reason in getattr(data, "bad", {}).items()
    }
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {name: bad for rank in gathered for name, bad in rank.items()}


def count_bad(bad: Mapping[str, Bad]) -> int:
    """How many samples these are."""
    return sum(one.count for one in bad.values())
