"""Whether losses, gradients and states are made of numbers, at the price of reading them once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

STATISTICS = ("running_mean", "running_var")
"""Buffers that take up what goes through a model. Others may be infinite on purpose, as masks of attention are."""


def known_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to bring a tensor to the CPU, and return a function that waits for it."""
    if not tensor.is_cuda:
        return lambda: tensor
    arriving, done = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
    done.record()

    def arrived() -> Tensor:
        done.synchronize()
        return arriving

    return arrived


class Gradients:
    """The length of each parameter's gradient in one step. On a GPU it is known later.

    Args:
        named: parameters by name; those without a gradient are left out.
        losses: of the step's parts, on this rank.

    Attributes:
        sparse: some of them name the rows they are of.
        total: length of all together.
    """

    @torch.no_grad()
    def __init__(self, named: Iterable[tuple[str, Tensor]], losses: Sequence[Tensor] = ()) -> None:
        found = [(name, part.grad) for name, part in named if part.grad is not None]
        self.names, self.losses = [name for name, _ in found], losses
        self.tensors = [gradient for _, gradient in found]
        self.sparse = any(gradient.is_sparse for gradient in self.tensors)
        lengths = torch._foreach_norm([_dense(gradient) for gradient in self.tensors]) if found else [torch.zeros(())]
        if len({length.dtype for length in lengths}) > 1:
            lengths = [length.double() for length in lengths]
        self.lengths = torch.stack(lengths)
        self.total = torch.linalg.vector_norm(self.lengths)
        self._arrived = known_later(self.lengths)

    def clip(self, longest: float) -> None:
        """Scale the gradients so that together they are no longer than this, as torch does."""
        torch._foreach_mul_(self.tensors, torch.clamp(longest / (self.total + 1e-6), max=1.0))

    def bad(self) -> list[str]:
        """Return the names of parameters whose gradient is not finite. On a GPU, waits for the backward pass."""
        finite = self._arrived().isfinite()
        return (
            [] if finite.all() else [name for name, good in zip(self.names, finite.tolist(), strict=True) if not good]
        )

    @property
    def loss(self) -> float:
        """The step's, on this rank."""
        return float(sum(self.losses))


def _dense(gradient: Tensor) -> Tensor:
    """Return the values of a gradient; half of the bits would not hold the length of a long one."""
    values = gradient._values() if gradient.is_sparse else gradient
    return values.float() if values.dtype == torch.float16 else values


def are_finite(losses: Sequence[Tensor], before: Gradients | None = None) -> bool | Callable[[], bool]:
    """Whether all parts of a step have a loss that is a number.

    Args:
        losses: of a GPU, a function tells: the backward pass can be given to the GPU before the forward pass is done.
        before: gradients of the step before, if nobody has looked at them yet.
    """
    good = torch.stack(list(losses)).isfinite().all()
    if not good.is_cuda and before is None:
        return bool(good)
    later = known_later(good)
    return lambda: bool(later()) and not (before is not None and before.bad())


def not_finite(content: Mapping[str, Any], buffers: Iterable[str] = ()) -> list[str]:
    """Return what of a captured state is not finite: weights, their average, statistics, the optimizer's state.

    Args:
        content: of a checkpoint, on the CPU.
        buffers: names of the model's buffers: but for `STATISTICS` they may be anything.
    """
    free = {name for name in buffers if name.rpartition(".")[2] not in STATISTICS}
    return [name for name, tensor in _judged(content, free) if tensor.is_floating_point() and not _is_finite(tensor)]


def _judged(content: Mapping[str, Any], free: set[str]) -> Iterator[tuple[str, Tensor]]:
    for prefix, part in (("", content), ("ema: ", content.get("ema") or {"model": {}})):
        yield from ((prefix + name, tensor) for name, tensor in part["model"].items() if name not in free)
    for number, slots in content["optimizer"]["state"].items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                yield f"{slot} of parameter {number} in the optimizer", value


def _is_finite(tensor: Tensor) -> bool:
    """Look at the sum first: that takes no memory."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
