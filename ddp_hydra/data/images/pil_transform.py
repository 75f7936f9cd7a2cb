"""Applies transforms of torchvision, and others that take one PIL image."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = frozenset(
    getattr(owner, name)
    for owner, names in (
        (torch, ("bernoulli", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm")),
        (Tensor, ("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial")),
        (Tensor, ("normal_", "random_", "uniform_")),
    )
    for name in names
)
"""Functions of torch that draw random numbers, and take a generator."""


class PilTransform:
    """Gives a transform each image as PIL knows it, and has its random numbers depend on the sample alone.

    What it draws from torch, as torchvision's transforms do, comes from a generator of the sample: the same in each
    run, whatever other threads draw. What it draws from the generators of Python or numpy is left as it is.

    Args:
        transform: takes a PIL image (RGB); returns anything.
    """

    def __init__(self, transform: Callable[[Image.Image], Any]) -> None:
        self.transform = transform

    def __call__(self, image: Tensor, rng: random.Random) -> Any:
        """Transform one image.

        Args:
            image: uint8 (3, height, width).
            rng: of the sample.
        """
        picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        with _DrawsFrom(torch.Generator().manual_seed(rng.getrandbits(63))):
            return self.transform(picture)


class _DrawsFrom(TorchFunctionMode):
    """Has torch draw from one generator in this thread, where the call names none.

    Args:
        generator: from which is drawn.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


def adapted(transform: Callable[..., Any] | None) -> Callable[[Tensor, random.Random], Any] | None:
    """Return a transform as `ImageDataset` calls it; one that takes a single argument gets PIL images.

    Args:
        transform: `(image, rng)`, as those of `transforms`, or `(image)`, as torchvision's; None.
    """
    if transform is None or _takes_rng(transform):
        return transform
    return PilTransform(transform)


def _takes_rng(transform: Callable[..., Any]) -> bool:
    called = transform.forward if isinstance(transform, nn.Module) else transform
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is one.empty for one in parameters) == 2
