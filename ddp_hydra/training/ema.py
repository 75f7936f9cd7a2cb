"""The moving average of a model's weights, which often judges better than the weights themselves."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]


class Ema:
    """An exponential moving average, which warms up (Polyak and Juditsky, 1992).

    Args:
        model: whose weights and buffers are averaged.
        decay: what is kept of the average in a step, at most: at first it is (1 + steps) / (10 + steps).

    Attributes:
        model: the average, a model like the first.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.averaged = AveragedModel(model, multi_avg_fn=self._mix, use_buffers=True)
        self.model: nn.Module = self.averaged.module
        self.model.requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        self.averaged.update_parameters(model)

    @torch.no_grad()
    def _mix(self, averaged: Tensors, current: Tensors, n_averaged: torch.Tensor | int) -> None:
        """Take in tensors of one type."""
        steps = int(n_averaged)
        if averaged[0].is_floating_point():
            torch._foreach_lerp_(averaged, current, 1 - min(self.decay, (1 + steps) / (10 + steps)))
        else:  # a count
            torch._foreach_copy_(averaged, current)

    def state_dict(self) -> dict[str, object]:
        """The average, and over how many steps."""
        return {"model": self.model.state_dict(), "steps": int(self.averaged.n_averaged)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Put it back."""
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        self.averaged.n_averaged.fill_(int(state["steps"]))  # type: ignore[call-overload]
