"""Keeps a moving average of a model's weights, which often predicts better than the weights themselves."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.training.finite import STATISTICS, is_finite


class Ema:
    """An exponential moving average, which warms up (Polyak and Juditsky, 1992).

    Args:
        model: its weights and buffers are averaged.
        decay: the share of the average that a step keeps, at most; at first it is (1 + steps) / (10 + steps).

    Attributes:
        model: the average, a copy of the model.
        steps: number of updates. It is not a tensor as in `torch.optim.swa_utils.AveragedModel`, because reading one
            from a GPU waits for the GPU.
        infinite: names of parameters that held infinite values from the beginning, as masks do.

    Raises:
        ConfigError: the model can't be copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model: nn.Module = _copied(model).requires_grad_(False)
        self.steps = 0
        self.infinite = {name for name, value in model.named_parameters() if not is_finite(value)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        weight = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        for (_, kind), (averaged, current) in self._by_type(model).items():
            if not self.steps or kind == "copied":
                torch._foreach_copy_(averaged, current)
            elif kind == "averaged":
                torch._foreach_lerp_(averaged, current, weight)
            else:
                for old, new in zip(averaged, current, strict=True):  # an infinite value has no average
                    old.copy_(torch.where(old.isfinite(), torch.lerp(old, new, weight), new))
        self.steps += 1

    def _by_type(
        self, model: nn.Module
    ) -> dict[tuple[torch.dtype, str], tuple[list[torch.Tensor], list[torch.Tensor]]]:
        groups: dict[tuple[torch.dtype, str], tuple[list[torch.Tensor], list[torch.Tensor]]]
        groups = defaultdict(lambda: ([], []))
        for averaged, (name, current, is_buffer) in zip(_tensors(self.model), _tensors(model), strict=True):
            group = groups[current.dtype, self._kind(name, current, is_buffer)]
            group[0].append(averaged[1])
            group[1].append(current)
        return groups

    def _kind(self, name: str, tensor: torch.Tensor, is_buffer: bool) -> str:
        is_number = (tensor.is_floating_point() and tensor.itemsize > 1) or tensor.is_complex()
        if not is_number or tensor.layout != torch.strided:
            return "copied"
        may_be_infinite = name in self.infinite or (is_buffer and name.rpartition(".")[2] not in STATISTICS)
        return "watched" if may_be_infinite else "averaged"

    def state_dict(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        self.steps = int(state["steps"])  # type: ignore[call-overload]


def _copied(model: nn.Module) -> nn.Module:
    # A tensor that a layer has computed is no leaf, as in torch's first `weight_norm`, and can't copy itself.
    values = (value for module in model.modules() for value in vars(module).values())
    computed = {id(one): one.detach().clone() for one in values if isinstance(one, torch.Tensor) and not one.is_leaf}
    try:
        return copy.deepcopy(model, computed)
    except Exception as error:  # a lock, an open file
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"trainer.ema_decay needs a copy of the model, and {type(model).__name__} can't be copied "
            f"({type(error).__name__}: {reason:.160}): give trainer.ema_decay=null, or build what can't be copied "
            "outside of the model"
        ) from error


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    yield from ((name, parameter, False) for name, parameter in model.named_parameters())
    yield from ((name, buffer, True) for name, buffer in model.named_buffers())
