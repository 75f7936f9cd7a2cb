"""Measures what reading the data costs a run, over all ranks.

A data set may report its cost with `stats()`: a dict of numbers that only grow. These are used here: samples (read),
bytes, requests, retries, cache_hits and cache_misses (of samples or of shards), bad_samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_hydra.data.loader import Loader
from ddp_hydra.errors import DataError
from ddp_hydra.training.consensus import gather_objects

COUNTS = ("samples", "bytes", "requests", "retries", "cache_hits", "cache_misses", "bad_samples")


class DataStats:
    """Adds up how long the loaders of all ranks waited, and what their data sets read.

    Args:
        loader: of the training data.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.previous = [0.0] * (2 + len(COUNTS))
        self.train_s = 0.0
        self.ranks = 1

    def local_counts(self, interval_s: float) -> list[float]:
        self.train_s += interval_s
        stats = self.loader.dataset.stats() if hasattr(self.loader.dataset, "stats") else {}
        return [self.loader.waited_s, self.train_s, *(float(stats.get(name, 0)) for name in COUNTS)]

    def interval(self, all_counts: Sequence[Sequence[float]]) -> dict[str, float]:
        # A collective if there are bad samples.
        self.ranks = len(all_counts)
        now = [sum(column) for column in zip(*all_counts, strict=True)]
        waited, spent, *counts = (a - b for a, b in zip(now, self.previous, strict=True))
        new, so_far = (dict(zip(COUNTS, numbers, strict=True)) for numbers in (counts, now[2:]))
        self.previous = now
        metrics = {"data_wait": waited / max(spent, 1e-9)}
        if not hasattr(self.loader.dataset, "stats"):
            return metrics
        if so_far["bad_samples"]:
            self._refuse_too_many()
        metrics["data/bytes_per_s"] = new["bytes"] / max(spent, 1e-9) * self.ranks
        metrics["data/cache_hits"] = new["cache_hits"] / max(1, new["cache_hits"] + new["cache_misses"])
        return metrics | {f"data/{name}": so_far[name] for name in ("retries", "bad_samples")}

    def totals(self) -> dict[str, float]:
        waited, spent, *counts = self.previous
        totals = {"wait_s": waited / self.ranks, "wait": waited / max(spent, 1e-9)}
        return totals | (dict(zip(COUNTS, counts, strict=True)) if hasattr(self.loader.dataset, "stats") else {})

    def _refuse_too_many(self) -> None:
        dataset = self.loader.dataset
        share = getattr(dataset, "max_bad_fraction", None)
        if share is None or not hasattr(dataset, "__len__"):  # a stream judges by itself
            return
        bad = bad_of_all_ranks(dataset)
        if count_bad(bad) > share * len(dataset):
            some = "; ".join(f"{name} ({bad[name][0]})" for name in sorted(bad)[:3])
            raise DataError(
                f"all ranks together found {count_bad(bad)} bad samples of {len(dataset)}, and data.max_bad_fraction="
                f"{share:g} allows {int(share * len(dataset))}: {some}. Remove them, or type a larger "
                "data.max_bad_fraction=..."
            )


def skipped_by(dataset: Any) -> str:
    skipped: Mapping[str, int] = getattr(dataset, "skipped", None) or {}
    if not skipped:
        return ""
    most = sorted(skipped.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{count:,} {kind or 'without extension'}" for kind, count in most[:5])
    return f"{sum(skipped.values()):,} files that are not images: {kinds}{', ...' if len(most) > 5 else ''}"


def bad_of_all_ranks(*datasets: Any) -> dict[str, tuple[str, int]]:
    # A collective.
    local = {
        name: (reason, getattr(data, "bad_counts", {}).get(name, 1))
        for data in datasets
        for name, reason in getattr(data, "bad", {}).items()
    }
    return {name: bad for rank in gather_objects(local) for name, bad in rank.items()}


def count_bad(bad: Mapping[str, tuple[str, int]]) -> int:
    return sum(count for _, count in bad.values())
