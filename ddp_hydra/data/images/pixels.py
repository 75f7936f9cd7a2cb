"""Changes pixels: colors at random, all in one step; normalisation; transforms that take one PIL image."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ddp_hydra.data.limits import check_range
from ddp_hydra.data.threads import is_thread_safe

_GREY = torch.tensor([0.299, 0.587, 0.114])
# From RGB to brightness and two axes of color: in this space a change of hue is a rotation.
_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_RGB = torch.linalg.inv(_YIQ)


@dataclass(frozen=True)
class ColorParams:
    """The color changes of one image: first brightness, then contrast, saturation and hue.

    All four are linear in the colors, and contrast also needs the image's mean. So they are one matrix and one offset,
    and the result is clipped once. The hue is rotated in YIQ, as NVIDIA's DALI does.

    Args:
        brightness: factor.
        contrast: factor of the distance from the image's mean grey.
        saturation: factor of the distance from grey.
        hue: rotation, as a share of the circle.
    """

    brightness: float
    contrast: float
    saturation: float
    hue: float

    def apply(self, image: Tensor) -> Tensor:
        pixels = image.permute(1, 2, 0).reshape(-1, 3).float()
        mean = float(pixels.mean(0) @ _GREY) * self.brightness
        pixels = torch.addmm(torch.full((3,), (1 - self.contrast) * mean), pixels, self.matrix().T)
        changed = pixels.clamp_(0, 255).round_().to(torch.uint8)
        return changed.view(*image.shape[1:], 3).permute(2, 0, 1)

    def matrix(self) -> Tensor:
        saturated = self.saturation * torch.eye(3) + (1 - self.saturation) * _GREY.expand(3, 3)
        angle = 2 * math.pi * self.hue
        sin, cos = math.sin(angle), math.cos(angle)
        turned = _RGB @ torch.tensor([[1, 0, 0], [0, cos, -sin], [0, sin, cos]]) @ _YIQ
        return self.brightness * self.contrast * (turned @ saturated)


class Jitter:
    """Draws color changes.

    Args:
        brightness: largest change of the factor 1, 0..1.
        contrast: largest change of the factor 1, 0..1.
        saturation: largest change of the factor 1, 0..1.
        hue: largest rotation to either side, as a share of the circle, 0..0.5.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(self, brightness: float, contrast: float, saturation: float, hue: float) -> None:
        self.factors = (brightness, contrast, saturation)
        self.hue = hue
        given = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue}
        for name, value in given.items():
            check_range(name, value, 0, 0.5 if name == "hue" else 1, example=0.1)

    def __bool__(self) -> bool:
        return any(self.factors) or bool(self.hue)

    def draw(self, rng: random.Random) -> ColorParams:
        brightness, contrast, saturation = (rng.uniform(1 - factor, 1 + factor) for factor in self.factors)
        return ColorParams(brightness, contrast, saturation, rng.uniform(-self.hue, self.hue))


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    # images: uint8 (batch, 3, height, width), in any memory format.
    # mean: (3,), 0..1.
    # std: (3,), 0..1.
    # Returns: float32 of the same shape and memory format.
    width = images.shape[-1]
    rows = images.permute(0, 2, 3, 1)
    if not rows.is_contiguous():
        offset, scale = _constants(mean, std, images.device, 1)
        return images.float().sub_(offset.view(1, 3, 1, 1)).mul_(scale.view(1, 3, 1, 1))
    # Compute whole rows of pixels at a time, because vectors of three are slow on a CPU.
    offset, scale = _constants(mean, std, images.device, width)
    rows = rows.reshape(-1, width * 3).float().sub_(offset).mul_(scale)
    return rows.view(-1, images.shape[2], width, 3).permute(0, 3, 1, 2)


@lru_cache(maxsize=64)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, width: int
) -> tuple[Tensor, Tensor]:
    # Return mean and 1/std for the bytes of a row of pixels, (3 * width,) each.
    scale = 1 / (torch.tensor(std, device=device) * 255)
    return (torch.tensor(mean, device=device) * 255).repeat(width), scale.repeat(width)


class PilTransform:
    """Gives a transform each image as PIL knows it.

    Args:
        transform: takes a PIL image (RGB); returns anything.
    """

    def __init__(self, transform: Callable[[Image.Image], Any]) -> None:
        self.transform = transform
        self.thread_safe = is_thread_safe(transform)

    def __call__(self, image: Tensor, rng: random.Random) -> Any:
        return self.transform(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()))


def adapted(transform: Callable[..., Any] | None) -> Callable[[Tensor, random.Random], Any] | None:
    # transform: `(image, rng)`, as in `transforms`, or `(image)`, as torchvision's; None.
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
