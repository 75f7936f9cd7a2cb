"""Changes the colors of an image at random, all of them in one step."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

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
        """Return an image with changed colors, both uint8 (3, height, width)."""
        pixels = image.permute(1, 2, 0).reshape(-1, 3).float()
        mean = float(pixels.mean(0) @ _GREY) * self.brightness
        pixels = torch.addmm(torch.full((3,), (1 - self.contrast) * mean), pixels, self.matrix().T)
        changed = pixels.clamp_(0, 255).round_().to(torch.uint8)
        return changed.view(*image.shape[1:], 3).permute(2, 0, 1)

    def matrix(self) -> Tensor:
        """Return the matrix from old colors to new ones, (3, 3)."""
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
            most = 0.5 if name == "hue" else 1
            if not 0 <= value <= most:
                raise ValueError(
                    f"{name} is {value}, and must be from 0 to {most}, the largest change: type data.{name}=0.1"
                )

    def __bool__(self) -> bool:
        return any(self.factors) or bool(self.hue)

    def draw(self, rng: random.Random) -> ColorParams:
        """Draw the color changes of one image."""
        brightness, contrast, saturation = (rng.uniform(1 - factor, 1 + factor) for factor in self.factors)
        return ColorParams(brightness, contrast, saturation, rng.uniform(-self.hue, self.hue))
