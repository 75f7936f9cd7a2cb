"""Keeps a moving average of a model's weights, which often predicts better than the weights themselves."""

from __future__ import annotations

import copy
from collections import defaultdict
from itertools import chain

import torch
from torch import nn


class Ema:
    """An exponential moving average, which warms up (Polyak and Juditsky, 1992).

    Args:
        model: its weights and buffers are averaged.
        decay: the share of the average that a step keeps, at most; at first it is (1 + steps) / (10 + steps).

    Attributes:
        model: the average, a copy of the model.
        steps: number of updates. It is not a tensor as in `torch.optim.swa_utils.AveragedModel`, because reading one
            from a GPU waits for the GPU.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model: nn.Module = copy.deepcopy(model).requires_grad_(False)
        self.steps = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the weights after a step to the average."""
        weight = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        for averaged, current in self._by_type(model):
            if self.steps and averaged[0].is_floating_point():
                torch._foreach_lerp_(averaged, current, weight)
            else:  # the first, or counts
                torch._foreach_copy_(averaged, current)
        self.steps += 1

    def _by_type(self, model: nn.Module) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return pairs of lists, the average's tensors and the model's, one pair per type: each takes one kernel."""
        groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for averaged, current in zip(_tensors(self.model), _tensors(model), strict=True):
            groups[averaged.dtype][0].append(averaged)
            groups[averaged.dtype][1].append(current)
        return list(groups.values())

    def state_dict(self) -> dict[str, object]:
        """Return the average and its number of steps."""
        return {"model": self.model.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore the average."""
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        self.steps = int(state["steps"])  # type: ignore[call-overload]


def _tensors(model: nn.Module) -> chain[torch.Tensor]:
    return chain(model.parameters(), model.buffers())
