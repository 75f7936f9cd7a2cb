"""Weighs losses: the gradient of a step is the gradient of the mean over the things of all micro-batches and ranks.

A micro-batch's loss is a mean over `n` things, of which only this rank knows. Gradients are averaged over the ranks. So
each loss is multiplied by n / N, where all ranks know N, and the averaged gradients by ranks · N / Σ n. Where n is the
number of samples, the latter is 1 and the former the share of the step's samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Step
from ddp_hydra.training.consensus import StepConsensus


class Weighing:
    """Weighs the losses of an update.

    Args:
        samples: of a step, on each rank.
        consensus: lets the ranks agree on N, once; Σ n travels with each vote.

    Attributes:
        scale: things for each sample in N, as in the first micro-batches of all ranks; None before these. Another
            number gives the same gradients but for rounding, so it is in checkpoints.
        n: things of this rank in the step so far; on the device where they depend on the data there.
        summed: the losses of the step are sums.
        is_empty: nothing counted in the step, on any rank.
    """

    def __init__(self, samples: int, consensus: StepConsensus) -> None:
        self.samples, self.consensus = samples, consensus
        self.scale: float | None = None
        self.begin()

    def begin(self) -> None:
        self.n: float | Tensor = 0.0
        self.summed = self.is_empty = False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = state["scale"]

    def weigh(self, step: Step, size: int) -> Tensor:
        # At the first one a collective.
        n = size if step.n is None else step.n
        self.n = self.n + n
        self.summed = step.summed
        if self.scale is None:
            self._agree(n, size)
        if step.summed:
            return step.loss
        if isinstance(n, Tensor):
            n = n.detach().double()
            _stop_gradient_where_zero(step.prediction, n)
        elif not n:
            return step.loss  # 0, see `TrainStep`
        weight = n / self.denominator
        return step.loss if not isinstance(weight, Tensor) and weight == 1 else step.loss * weight

    @property
    def denominator(self) -> float:
        return self.samples * (self.scale or 1.0)

    def unweighed(self, losses: Sequence[Tensor]) -> Callable[[], float]:
        n, denominator = self.n, 0.0 if self.summed else self.denominator

        def mean() -> float:
            total, things = float(sum(losses)), float(n)
            return total * denominator / things if things and denominator else total

        return mean

    def _agree(self, n: float | Tensor, size: int) -> None:
        of_ranks = self.consensus.gather_objects((float(n), float(size)))
        things, samples = (math.fsum(column) for column in zip(*of_ranks, strict=True))
        if things > 0 and math.isfinite(things):
            self.scale = things / samples

    def factor(self, n: Sequence[float]) -> float:
        if self.summed:
            return float(self.consensus.world_size)
        if not n:
            return 1.0
        total = math.fsum(n)
        if not (math.isfinite(total) and min(n) >= 0):
            raise ValueError(f"the task's n is {', '.join(map(str, n))} on the ranks: it must be 0 or more")
        self.is_empty = total == 0
        return 1.0 if self.is_empty else len(n) * self.denominator / total

    def refuse_uneven(self, n: Sequence[float], hook: str) -> None:
        if not self.summed and (len(set(n)) > 1 or self.factor(n) != 1):
            things = ", ".join(f"{one:g}" for one in n)
            raise ConfigError(
                f"parallel.comm_hook={hook} is for losses whose mean is over the same number of things in each step "
                f"and on each rank, but this step's are over {things}: give parallel.comm_hook=auto, fp16 or bf16"
            )


def _stop_gradient_where_zero(prediction: Any, n: Tensor) -> None:
    if isinstance(prediction, Tensor) and prediction.requires_grad:
        prediction.register_hook(lambda gradient: gradient.where(n > 0, 0.0))
