"""Transforms images of any size to one size, at random for training.

A transform is called as `transform(image, rng)`. The image is uint8 (3, height, width). `rng` is the sample's own
`random.Random`, so its numbers do not depend on threads, ranks or the order of samples. The transform returns a new
uint8 tensor and leaves its input unchanged. The transforms of this module can also draw their parameters before the
image is decoded (`draw`), so that it is decoded no larger than necessary.
"""

from __future__ import annotations

import math
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ddp_hydra.data.images.decode import ColorParams, Jitter, JpegHeader, decode_jpeg
from ddp_hydra.data.names import check_range

_before = os.environ.get("LD_LIBRARY_PATH")
import cv2  # noqa: E402  it changes the environment

if _before is None:
    os.environ.pop("LD_LIBRARY_PATH", None)
else:
    os.environ["LD_LIBRARY_PATH"] = _before
cv2.setNumThreads(1)  # it computes in the calling thread


@dataclass(frozen=True)
class CropParams:
    """The parameters of the transform of one image: its crop, in pixels, and what is done with that."""

    top: float
    left: float
    height: float
    width: float
    flip: bool = False
    shift: tuple[int, int] = (0, 0)  # pixels by which it is moved down and to the right, over black
    color: ColorParams | None = None
    erased: tuple[int, int, int, int] | None = None  # (top, left, height, width) of what becomes grey, in the result


class _Transform(ABC):
    """Crops an image and resizes it; subclasses choose the crop."""

    thread_safe = True
    size: int
    smooth: bool
    fill: Tensor

    @abstractmethod
    def draw(self, height: int, width: int, rng: random.Random) -> CropParams:
        """Draw the parameters for an image of `height` and `width` pixels."""

    def of_jpeg(self, data: Any, header: JpegHeader, rng: random.Random) -> Tensor:
        """Decode a JPEG no larger than necessary, and transform it."""
        params = self.draw(header.height, header.width, rng)
        needed = self.size / min(params.height, params.width)
        pixels = decode_jpeg(data, header, needed, exact=self.smooth)
        return self._make(pixels, params, (pixels.shape[0] / header.height, pixels.shape[1] / header.width))

    def __call__(self, image: Tensor, rng: random.Random) -> Tensor:
        """Transform one image."""
        done = self._make(image.permute(1, 2, 0).numpy(), self.draw(image.shape[1], image.shape[2], rng))
        return done.clone() if done.data_ptr() == image.data_ptr() else done

    def _make(self, pixels: np.ndarray, params: CropParams, scale: tuple[float, float] = (1.0, 1.0)) -> Tensor:
        # pixels: uint8 (height, width, 3).
        height, width = pixels.shape[:2]
        top = min(round(params.top * scale[0]), height - 1)
        left = min(round(params.left * scale[1]), width - 1)
        bottom = max(top + 1, round((params.top + params.height) * scale[0]))
        right = max(left + 1, round((params.left + params.width) * scale[1]))
        # numpy, because each torch operation would release the interpreter lock and wait for it again.
        part = pixels[top:bottom, left:right]
        if part.shape[:2] != (self.size, self.size):
            part = resize(part, self.size, self.smooth)
        if params.shift != (0, 0):
            down, right = params.shift
            move = np.array([[1, 0, right], [0, 1, down]], np.float32)
            part = cv2.warpAffine(part, move, (self.size, self.size), flags=cv2.INTER_NEAREST)  # over black
        if params.flip:
            part = cv2.flip(part, 1)
        made = torch.from_numpy(part.transpose(2, 0, 1))
        if params.color is not None:
            made = params.color.apply(made)
        if params.erased is not None:
            top, left, height, width = params.erased
            made = made.clone()
            made[:, top : top + height, left : left + width] = self.fill
        return made


class EvalTransform(_Transform):
    """Crops the centre and resizes it; nothing is random.

    Args:
        size: side of the square result, pixels.
        center_crop: share of the shorter side that is kept, above 0 and up to 1. It is a share and not a number of
            pixels, so that validation sees the same part at any `size`. Usual for ImageNet is 0.875: 224 of 256.
        smooth: decode and resize exactly as Pillow and torchvision; otherwise a quarter faster, see `resize`.

    Raises:
        ValueError: `size` or `center_crop` is out of its range.
    """

    thread_safe = True

    def __init__(self, size: int, center_crop: float = 1.0, smooth: bool = True) -> None:
        check_range("image_size", size, 1, example=32)
        check_range("center_crop", center_crop, 0, 1, example=0.875, above=True)
        self.size, self.center_crop, self.smooth = size, center_crop, smooth

    def draw(self, height: int, width: int, rng: random.Random) -> CropParams:
        """Return the centre; `rng` is not used."""
        side = max(1, round(min(height, width) * self.center_crop))
        return CropParams(round((height - side) / 2), round((width - side) / 2), side, side)


class TrainTransform(_Transform):
    """Crops at random, resizes, mirrors some images and changes colors: the usual augmentation of photos.

    Args:
        size: side of the square result, pixels.
        scale: smallest and largest area of the crop, as shares of the image's area, 0..1.
        ratio: smallest and largest width / height of the crop.
        flip: probability of a mirror image, 0..1. Use 0 if left and right mean something, as in digits.
        pad_crop: if above 0, replaces the crop by `scale` and `ratio`: the whole image is resized, and moved by at most
            this many pixels over black, as is usual for CIFAR.
        brightness: largest change of the brightness factor 1, 0..1, as in torchvision's ColorJitter.
        contrast: the same for the contrast.
        saturation: the same for the saturation.
        hue: largest rotation of the hue, as a share of the circle, 0..0.5.
        erase: probability that a rectangle becomes mean grey, 0..1, as in torchvision's RandomErasing.
        fill: (3,), that grey, 0..1.
        smooth: as in `EvalTransform`.

    Raises:
        ValueError: a value is out of its range.
    """

    thread_safe = True

    def __init__(
        self,
        size: int,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        pad_crop: int = 0,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        hue: float = 0.0,
        erase: float = 0.0,
        fill: Sequence[float] = (0.485, 0.456, 0.406),
        smooth: bool = False,
    ) -> None:
        check_range("image_size", size, 1, example=32)
        self.size, self.smooth = size, smooth
        self.scale = _range("crop_scale", scale, at_most=1.0)
        self.ratio = _range("crop_ratio", ratio, at_most=math.inf)
        check_range("flip", flip, 0, 1, example=0.5)
        check_range("erase", erase, 0, 1, example=0.5)
        check_range("pad_crop", pad_crop, 0, example=4)
        self.flip, self.erase, self.pad_crop = flip, erase, pad_crop
        self.jitter = Jitter(brightness, contrast, saturation, hue)
        self.fill = (torch.tensor(tuple(fill)) * 255).round().to(torch.uint8).view(3, 1, 1)

    def draw(self, height: int, width: int, rng: random.Random) -> CropParams:
        """Draw the crop, the mirroring, the color changes and the erased part."""
        top, left, shift = 0, 0, (0, 0)
        if self.pad_crop:
            shift = rng.randint(-self.pad_crop, self.pad_crop), rng.randint(-self.pad_crop, self.pad_crop)
        else:
            top, left, height, width = _random_box(height, width, self.scale, self.ratio, rng)
        flip = rng.random() < self.flip
        color = self.jitter.draw(rng) if self.jitter else None
        erased = None
        if self.erase and rng.random() < self.erase:
            erased = _random_box(self.size, self.size, _ERASED_AREA, _ERASED_RATIO, rng)
        return CropParams(top, left, height, width, flip, shift, color, erased)


_ERASED_AREA, _ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)
"""The values of torchvision's RandomErasing, from Zhong et al., Random Erasing Data Augmentation (arXiv 1708.04896)."""


def resize(pixels: np.ndarray, size: int, smooth: bool = True) -> np.ndarray:
    """Resize an image, uint8 (height, width, 3), to a square.

    `smooth` averages all pixels that become one, as torchvision does. Else the nearest four are averaged, which takes
    half the time; images of twice the size or more would look rough, so these are smoothed anyway.
    """
    if not smooth and min(pixels.shape[:2]) < 2 * size:
        return cv2.resize(pixels, (size, size))
    # With a batch dimension torch recognises channels last, and does not rearrange all pixels twice.
    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    resized = F.interpolate(batch, size=(size, size), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def _random_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], rng: random.Random
) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            break
    else:  # hardly any such crop fits into so long an image: use the largest square
        box_width = box_height = min(height, width)
    return rng.randint(0, height - box_height), rng.randint(0, width - box_width), box_height, box_width


def _range(name: str, bounds: Sequence[float], at_most: float) -> tuple[float, float]:
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] <= at_most:
        raise ValueError(f"{name} is {list(bounds)}, and must be two rising numbers above 0: data.{name}=[0.8,1.0]")
    return bounds[0], bounds[1]
