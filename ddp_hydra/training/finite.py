"""Checks whether losses, gradients and states are finite. Each is read once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hydra.training.plain_state import begin_copy, local

STATISTICS = ("running_mean", "running_var")
"""Buffers that are computed from data. Others may be infinite on purpose, as attention masks are."""


class GradientNorms:
    """The norm of each parameter's gradient in one step. On a GPU it arrives later, when the gradients may be gone.

    Args:
        named: gradients with the names of their parameters.
        loss: returns the loss of the step, on this rank.
        over_ranks: makes the norms of whole gradients of the norms of this rank's shares. A collective.
    """

    @torch.no_grad()
    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        loss: Callable[[], float] = float,
        over_ranks: Callable[[Tensor], Tensor] = lambda norms: norms,
    ) -> None:
        named = list(named)
        self.names, gradients = [name for name, _ in named], [gradient for _, gradient in named]
        kinds = {(gradient.layout, gradient.dtype) for gradient in gradients}
        self.sparse, self.loss = any(layout != torch.strided for layout, _ in kinds), loss
        if self.sparse or torch.float16 in {dtype for _, dtype in kinds}:
            gradients = list(map(_dense, gradients))
        norms = torch._foreach_norm(gradients) if gradients else [torch.zeros(())]
        if len(kinds) > 1 and len({norm.dtype for norm in norms}) > 1:
            norms = [norm.double() for norm in norms]
        self.norms = over_ranks(torch.stack(norms))
        self._on_cpu = begin_copy(self.norms)

    @functools.cached_property
    def total_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.norms)

    def clip(self, gradients: list[Tensor], max_norm: float) -> None:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (self.total_norm + 1e-6), max=1.0))

    def nonfinite_names(self) -> list[str]:
        # On a GPU, wait for the backward pass.
        norms = self._on_cpu()
        if math.isfinite(norms.sum()):
            return []
        return [name for name, good in zip(self.names, norms.isfinite().tolist(), strict=True) if not good]


def _dense(gradient: Tensor) -> Tensor:
    values = gradient._values() if gradient.is_sparse else gradient
    return values.float() if values.dtype == torch.float16 else values


def are_finite(losses: Sequence[Tensor], before: GradientNorms | None = None) -> bool | Callable[[], bool]:
    # On a GPU, return a function that waits for the answer: meanwhile the backward pass can be launched.
    good = torch.stack(list(losses)).isfinite().all()
    if not good.is_cuda and before is None:
        return bool(good)
    on_cpu = begin_copy(good)
    return lambda: bool(on_cpu()) and not (before is not None and before.nonfinite_names())


def is_finite(tensor: Tensor) -> bool:
    values = local(tensor.detach())
    if values.layout is torch.sparse_coo:
        values = values._values()
    if values.layout is not torch.strided or not (values.is_floating_point() or values.is_complex()):
        return True
    if values.itemsize == 1:  # float8 has no sum
        values = values.float()
    # The sum is checked first: it needs no memory.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def not_finite(content: Mapping[str, Any], buffers: Iterable[str] = (), of_task: Collection[str] = ()) -> list[str]:
    unchecked = {name for name in buffers if name.rpartition(".")[2] not in STATISTICS}
    parts = (content.get("task") or {"parts": {}})["parts"]
    states = {part: state for part, state in parts.items() if isinstance(state, Mapping)}
    named = {f"task.{part}.{name}": one for part, state in states.items() for name, one in state.items()}
    checked = [*_checked(content, unchecked), *((name, named.get(name)) for name in of_task)]
    return [name for name, value in checked if isinstance(value, Tensor) and not is_finite(value)]


def _checked(content: Mapping[str, Any], unchecked: set[str]) -> Iterator[tuple[str, Any]]:
    for prefix, part in (("", content), ("ema: ", content.get("ema") or {"model": {}})):
        yield from ((prefix + name, tensor) for name, tensor in part["model"].items() if name not in unchecked)
    loss = {f"loss.{name}": value for name, value in (content.get("loss") or {}).items()}
    yield from ((name, value) for name, value in loss.items() if name not in unchecked)
    optimizer = content["optimizer"]
    for name, state in [("the optimizer", optimizer)] if "state" in optimizer else optimizer.items():
        known = state.get("state") if isinstance(state, Mapping) else None
        for parameter, slots in known.items() if isinstance(known, Mapping) else ():
            for slot, value in slots.items() if isinstance(slots, Mapping) else ():
                yield from ((f"{slot} of {parameter} in {name}", tensor) for tensor in _tensors_in(value))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(one)
