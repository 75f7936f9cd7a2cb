"""Measures for how long a step waits for the gradients of other ranks.

DistributedDataParallel takes the times of some steps: of the first ten, and of each hundredth. Much of the exchange
runs beside the backward pass. Only what is left after it is counted here, and the time that communication hooks wait. A
faster network would shorten it, and so would a slow rank if it were as fast as the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_hydra.training.parallel import Parallel

WARM_UP = 2
"""Number of first steps, which also connect the ranks. Their times count only until other steps are measured."""
NS_PER_S = 1e9


class ExchangeTime:
    """Estimates the time that all steps of a run have waited for gradients.

    Attributes:
        steps: done since `watch`.
    """

    def __init__(self) -> None:
        self.is_alone = dist.get_world_size() == 1
        self.steps, self.before_s = 0, 0.0
        self.mean_s, self.held_s = math.nan, 0.0

    def watch(self, parallels: Sequence[Parallel]) -> None:
        """Measure these updates of a step from now on, in place of those before.

        Args:
            parallels: of the updates. Those that are not DistributedDataParallel take no times.
        """
        if not math.isnan(self.mean_s):
            self.before_s += self.mean_s * self.steps + self.held_s
            self.steps = 0
        self.parallels = parallels
        self.modules = [one.wrapped for one in parallels if isinstance(one.wrapped, DistributedDataParallel)]
        self.is_known = len(self.modules) == len(parallels)
        self.measured_at = self.count = 0
        self.sum_s = 0.0
        self.mean_s, self.held_s = math.nan, 0.0

    def local_seconds(self) -> list[float]:
        """Return this rank's seconds, for `interval`.

        They are the mean wait of a step after its backward pass, NaN while it is not known; and the wait of all steps
        in hooks.
        """
        if self.is_known and not self.is_alone:
            self._measure()
        mean_s = self.sum_s / self.count if self.count else math.nan
        return [mean_s, sum(one.held_s() for one in self.parallels)]

    def _measure(self) -> None:
        found = [module._get_ddp_logging_data() for module in self.modules]
        step = int(found[0].get("iteration", 0))
        if step <= self.measured_at or not all("backward_comm_time" in times for times in found):
            return
        if self.measured_at <= WARM_UP:
            self.sum_s, self.count = 0.0, 0
        waited_ns = (times["backward_comm_time"] - times["backward_compute_comm_overlap_time"] for times in found)
        self.sum_s += sum(max(0, part) for part in waited_ns) / NS_PER_S
        self.count, self.measured_at = self.count + 1, step

    def interval(self, all_seconds: Sequence[Sequence[float]]) -> None:
        """Take over the local seconds of each rank."""
        self.mean_s, self.held_s = (sum(column) / len(all_seconds) for column in zip(*all_seconds, strict=True))

    def total_s(self) -> float | None:
        """Return for how long a rank has waited since the run began, in seconds; None if it is not known."""
        if self.is_alone:
            return 0.0
        if math.isnan(self.mean_s):
            return self.before_s or None
        return self.before_s + self.mean_s * self.steps + self.held_s
