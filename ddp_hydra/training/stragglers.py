"""Finds the slowest rank.

All ranks take the same time for a step, because they wait for each other. So only the time that each rank works alone
is compared: waiting for its data, and the model's forward pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddp_hydra.data.loader import Loader


class Stragglers:
    """Measures how long this rank works alone in each step.

    Args:
        loader: of the training data.
        device: of the model.
    """

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self.forward_s = 0.0
        self.events: list[tuple[Any, Any]] = []
        self.forward_began: Any = None
        self.waited_s = loader.waited_s
        self.sums: list[float] = []

    def watch(self, step: nn.Module) -> None:
        """Measure a training step inside DDP: DDP waits for other ranks before it calls the step."""
        step.register_forward_pre_hook(self._begin)
        step.register_forward_hook(self._end)

    def _begin(self, step: nn.Module, inputs: Any) -> None:
        self.forward_began = self._now() if step.training else None

    def _end(self, step: nn.Module, inputs: Any, output: Any) -> None:
        if self.forward_began is None:
            return
        if self.device.type == "cuda":
            self.events.append((self.forward_began, self._now()))
        else:
            self.forward_s += self._now() - self.forward_began

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def local_seconds(self) -> list[float]:
        """Return the seconds that this rank worked alone since the last call, for `interval`."""
        for begin, end in self.events:  # the device has finished them
            self.forward_s += begin.elapsed_time(end) / 1000
        seconds = self.forward_s + self.loader.waited_s - self.waited_s
        self.forward_s, self.waited_s = 0.0, self.loader.waited_s
        self.events.clear()
        return [seconds]

    def interval(self, all_seconds: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the slowest rank's seconds as a multiple of the median; nothing for a single rank.

        Args:
            all_seconds: the local seconds of each rank.
        """
        if len(all_seconds) == 1:
            return {}
        ranks = [seconds for (seconds,) in all_seconds]
        self.sums = [total + one for total, one in zip(self.sums or [0.0] * len(ranks), ranks, strict=True)]
        return {"slowest_rank": max(ranks) / max(statistics.median(ranks), 1e-9)}

    def totals(self) -> dict[str, float]:
        """Return the slowest rank of the run, and its seconds as a multiple of the median; empty for a single rank."""
        if not self.sums:
            return {}
        slowest = max(range(len(self.sums)), key=self.sums.__getitem__)
        return {"rank": slowest, "times": self.sums[slowest] / max(statistics.median(self.sums), 1e-9)}
