"""Which rank is slow.

All ranks take the same time for a step, for they wait for each other; so what is compared is what each does alone:
waiting for its data, and the model's forward pass.
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
    """Measures this rank's own part of each step.

    Args:
        model: the bare one: inside of DDP, which waits for other ranks before it calls it.
        loader: of the training data.
        device: of the model.
        hooks: measure the forward pass; not of a compiled model, which would be cut by it.
    """

    def __init__(self, model: nn.Module, loader: Loader, device: torch.device, hooks: bool = True) -> None:
        self.loader, self.device = loader, device
        self.forward_s = 0.0
        self.events: list[tuple[Any, Any]] = []
        self.begun: Any = None
        self.waited_s = loader.waited_s
        self.totals: list[float] = []
        if hooks:
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._end)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self.begun = self._now() if model.training else None

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self.begun is None:
            return
        if self.device.type == "cuda":
            self.events.append((self.begun, self._now()))
        else:
            self.forward_s += self._now() - self.begun

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mine(self) -> list[float]:
        """This rank's part in a lap: seconds that it has worked alone since the last one."""
        for begin, end in self.events:  # the device has been waited for
            self.forward_s += begin.elapsed_time(end) / 1000
        own = self.forward_s + self.loader.waited_s - self.waited_s
        self.forward_s, self.waited_s = 0.0, self.loader.waited_s
        self.events.clear()
        return [own]

    def lap(self, of_all: Sequence[Sequence[float]]) -> dict[str, float]:
        """The slowest rank's part as a multiple of the median.

        Args:
            of_all: each rank's part.
        """
        if len(of_all) == 1:
            return {}
        ranks = [own for (own,) in of_all]
        self.totals = [total + one for total, one in zip(self.totals or [0.0] * len(ranks), ranks, strict=True)]
        return {"slowest_rank": max(ranks) / max(statistics.median(ranks), 1e-9)}

    def total(self) -> dict[str, float]:
        """Of the whole run: the slowest rank, and its part as a multiple of the median; empty for a single rank."""
        if not self.totals:
            return {}
        slowest = max(range(len(self.totals)), key=self.totals.__getitem__)
        return {"rank": slowest, "times": self.totals[slowest] / max(statistics.median(self.totals), 1e-9)}
