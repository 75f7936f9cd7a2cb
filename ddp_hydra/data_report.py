"""What reading the data costs a run, over all ranks.

A data set may tell what it has cost its process so far with `stats()`, a dict of rising numbers. Those that are known
here: samples (read), bytes, requests, retries, cache_hits (samples or shards that were there), bad_samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_hydra.errors import DataError
from ddp_hydra.loader import Loader

COUNTS = ("samples", "bytes", "requests", "retries", "cache_hits", "bad_samples")


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
        waited, spent, samples, n_bytes, _, _, hits, _ = (a - b for a, b in zip(now, self.before, strict=True))
        self.before = now
        lap = {"data_wait": waited / max(spent, 1e-9)}
        if not hasattr(self.loader.dataset, "stats"):
            return lap
        retries, bad = now[5], now[7]
        if bad:
            self._refuse_too_many()
        lap |= {"data/bytes_per_s": n_bytes / max(spent, 1e-9) * self._ranks(), "data/retries": retries}
        return lap | {"data/cache_hits": hits / max(samples, 1), "data/bad_samples": bad}

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
        if len(bad) > share * len(dataset):
            some = "; ".join(f"{name} ({reason})" for name, reason in sorted(bad.items())[:3])
            raise DataError(
                f"all ranks together found {len(bad)} bad samples of {len(dataset)}, and data.max_bad_fraction="
                f"{share:g} allows {int(share * len(dataset))}: {some}. Remove them, or type a larger "
                "data.max_bad_fraction=..."
            )

    def _ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1


def bad_of_all_ranks(*datasets: Any) -> dict[str, str]:
    """{name: reason} of the samples that any rank replaced. A collective."""
    mine = {name: reason for data in datasets for name, reason in getattr(data, "bad", {}).items()}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {name: reason for rank in gathered for name, reason in rank.items()}
