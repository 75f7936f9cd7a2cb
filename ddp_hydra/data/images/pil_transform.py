"""Applies transforms of torchvision, and others that take one PIL image."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

from PIL import Image
from torch import Tensor, nn

from ddp_hydra.data.thread_safe import is_thread_safe


class PilTransform:
    """Gives a transform each image as PIL knows it.

    Args:
        transform: takes a PIL image (RGB); returns anything.
    """

    def __init__(self, transform: Callable[[Image.Image], Any]) -> None:
        self.transform = transform
        self.thread_safe = is_thread_safe(transform)

    def __call__(self, image: Tensor, rng: random.Random) -> Any:
        """Transform one image.

        Args:
            image: uint8 (3, height, width).
            rng: of the sample; not used: what the transform draws comes from the global generators.
        """
        return self.transform(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()))


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
