"""Counts the operations of a model, and compares them to a GPU's peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

TRAINING = 3
"""A training step costs about three forward passes: the backward pass costs two."""

PEAK_TFLOPS = {
    ("B200", "bf16"): 2250.0,
    ("H200", "bf16"): 989.0,
    ("H200", "tf32"): 495.0,
    ("H100", "bf16"): 989.0,
    ("H100", "tf32"): 495.0,
    ("A100", "bf16"): 312.0,
    ("A100", "tf32"): 156.0,
    ("L40S", "bf16"): 362.0,
    ("L4", "bf16"): 121.0,
    ("A10", "bf16"): 125.0,
    ("V100", "fp16"): 125.0,
    ("T4", "fp16"): 65.0,
}
"""Dense peaks of matrix units, from the makers' data sheets; SXM where there are several."""


@dataclass
class Cost:
    """The operations of a model for one sample.

    Args:
        forward: floating-point operations of the forward pass; 0 if torch can't count them.
        parts: name of each direct child -> its class, number of parameters, and operations.
    """

    forward: int
    parts: dict[str, tuple[str, int, int]] = field(default_factory=dict)


@torch.no_grad()
def count(model: nn.Module, forward: Callable[[], Any], samples: int = 1) -> Cost:
    """Count the operations of a forward pass: convolutions, matrix products and attention; the rest is small.

    Args:
        model: not wrapped in DDP; it is left as it was.
        forward: computes the forward pass of the model, which is not compiled.
        samples: in that forward pass.
    """
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton

    in_training = [module for module in model.modules() if module.training]
    gpus = list({parameter.device for parameter in model.parameters() if parameter.is_cuda})
    model.eval()
    counter = FlopCounterMode(display=False)
    try:
        watched = _by_child(model, counter.get_total_flops)
        with _eagerly(), watched as of_children, counter, torch.random.fork_rng(gpus):
            forward()
    finally:
        for module in in_training:  # some may be frozen
            module.training = True
    parts = {
        name: (
            type(child).__name__,
            sum(parameter.numel() for parameter in child.parameters()),
            of_children[name] // samples,
        )
        for name, child in model.named_children()
    }
    return Cost(counter.get_total_flops() // samples, parts)


def _eagerly() -> Any:
    """Return a context in which nothing is compiled, as what is compiled can't be counted (torch from 2.6 on)."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()


@contextmanager
def _by_child(model: nn.Module, total: Callable[[], int]) -> Iterator[Counter[str]]:
    """Yield what a total grows by in each direct child. The counter's own names depend on who calls the model."""
    grown: Counter[str] = Counter()

    def watch(name: str, child: nn.Module, stack: ExitStack) -> None:
        began: list[int] = []
        stack.callback(child.register_forward_pre_hook(lambda *_: began.append(total())).remove)
        stack.callback(child.register_forward_hook(lambda *_: grown.update({name: total() - began.pop()})).remove)

    with ExitStack() as stack:
        for name, child in model.named_children():
            watch(name, child, stack)
        yield grown


def peak_tflops(device: str, precision: str) -> float | None:
    """Return the peak TFLOP/s of a GPU by its name; None if it is not known."""
    precision = {"fp16": "bf16"}.get(precision, precision) if "V100" not in device and "T4" not in device else precision
    words: Sequence[str] = device.replace("-", " ").split()
    return next((peak for (name, kind), peak in PEAK_TFLOPS.items() if name in words and kind == precision), None)


def utilisation(cost: Cost, samples_per_s: float, device: str, precision: str) -> float | None:
    """Return the share of a GPU's peak that training uses (MFU, Chowdhery et al., 2022).

    Args:
        cost: of a sample.
        samples_per_s: of one rank.
        device: the GPU's name.
        precision: trainer.precision.
    """
    peak = peak_tflops(device, precision)
    return None if peak is None or not cost.forward else TRAINING * cost.forward * samples_per_s / (peak * 1e12)
