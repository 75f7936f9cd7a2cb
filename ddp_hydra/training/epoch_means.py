"""Holds the means of the training metrics over an epoch: what best.pt, early stopping and sweeps go by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ddp_hydra.tasks import Task


class EpochMeans:
    """Adds up what all ranks have counted in the epoch under way, and keeps the means of the last whole epoch.

    All ranks hold the same sums, so a checkpoint saves them once, and a resume may have another number of ranks.

    Args:
        task: makes metrics of sums.

    Attributes:
        sums: name -> sum over the epoch under way, float64 on the CPU.
        last: name -> mean over the last whole epoch; {} before its end.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.sums: dict[str, Tensor] = {}
        self.last: dict[str, float] = {}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add the sums over all ranks since the last call."""
        for name, part in sums.items():
            self.sums[name] = self.sums[name] + part if name in self.sums else part

    def so_far(self) -> dict[str, float]:
        """Return the metrics of the epoch under way; {} where no step has counted yet."""
        found = self.task.metrics(self.sums) if self.sums else {}
        return {name: float(value) for name, value in found.items()}

    def end_epoch(self) -> None:
        """Keep the means of the epoch, and begin the next one. An epoch whose steps were all left out has none."""
        self.last = self.so_far() or self.last
        self.sums = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the last means for a checkpoint."""
        return {"sums": dict(self.sums), "last": dict(self.last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums and means of a checkpoint."""
        self.sums, self.last = dict(state["sums"]), dict(state["last"])
