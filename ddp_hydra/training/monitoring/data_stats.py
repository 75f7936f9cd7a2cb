"""What reading the data costs a run, over all ranks.

A data set may tell what it has cost its process so far with `stats()`, a dict of rising numbers. Those that are known
here: samples (read), bytes, requests, retries, cache_hits and cache_misses (of samples or of shards), bad_samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ddp_hydra.data.loader import Loader
from ddp_hydra.errors import DataError

COUNTS = ("samples", "bytes", "requests", "retries", "cache_hits", "cache_misses", "bad_samples")


class DataStats:
    """Adds up what the loaders of all ranks waited and their data sets read.

    Args:
        loader: of the training data.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.before = [0.0] * (2 + len(COUNTS))
        self.spent_s = 0.0
        self.ranks = 1

    def mine(self, spent_s: float) -> list[float]:
        """This rank's part in a lap: what it cost so far.

        Args:
            spent_s: length of the lap, without validation, in seconds.
        """
        self.spent_s += spent_s
        stats = self.loader.dataset.stats() if hasattr(self.loader.dataset, "stats") else {}
        return [self.loader.waited_s, self.spent_s, *(float(stats.get(name, 0)) for name in COUNTS)]

    def lap(self, of_all: Sequence[Sequence[float]]) -> dict[str, float]:
        """What the time since the last lap was like. All ranks call it, for they may have to agree on bad samples.

        Args:
            of_all: each rank's part.

        Raises:
            DataError: all ranks together found too many bad samples.
        """
        self.ranks = len(of_all)
        now = [sum(column) for column in zip(*of_all, strict=True)]
        waited, spent, *counts = (a - b for a, b in zip(now, self.before, strict=True))
        new, so_far = (dict(zip(COUNTS, numbers, strict=True)) for numbers in (counts, now[2:]))
        self.before = now
        lap = {"data_wait": waited / max(spent, 1e-9)}
        if not hasattr(self.loader.dataset, "stats"):
            return lap
        if so_far["bad_samples"]:
            self._refuse_too_many()
        lap["data/bytes_per_s"] = new["bytes"] / max(spent, 1e-9) * self.ranks
        lap["data/cache_hits"] = new["cache_hits"] / max(1, new["cache_hits"] + new["cache_misses"])
        return lap | {f"data/{name}": so_far[name] for name in ("retries", "bad_samples")}

    def total(self) -> dict[str, float]:
        """What the run was like as a whole, for its summary; as of the last lap."""
        waited, spent, *counts = self.before
        total = {"wait_s": waited / self.ranks, "wait": waited / max(spent, 1e-9)}
        return total | (dict(zip(COUNTS, counts, strict=True)) if hasattr(self.loader.dataset, "stats") else {})

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


def skipped_by(dataset: Any) -> str:
    """Say how many files a data set left out, and of which extensions; "" where it left out none, or does not tell."""
    skipped: Mapping[str, int] = getattr(dataset, "skipped", None) or {}
    if not skipped:
        return ""
    most = sorted(skipped.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{count:,} {kind or 'without extension'}" for kind, count in most[:5])
    return f"{sum(skipped.values()):,} files that are no images: {kinds}{', ...' if len(most) > 5 else ''}"


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
