"""From an image of any size to one of a given size, with or without chance.

A transform is called as `transform(image, rng)`: image uint8 (3, height, width), rng the sample's own
`random.Random`, so that what it draws does not depend on threads, ranks or the order of samples. It returns
a new uint8 tensor and leaves its input as it is. These here can also say what they will do before the image
is decoded (`draw`), so that no more of it is decoded than they will look at.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ddp_hydra.data.images.color_jitter import ColorParams, Jitter
from ddp_hydra.data.images.decode import JpegHeader, decode_jpeg
from ddp_hydra.data.images.opencv import cv2


@dataclass(frozen=True)
class CropParams:
    """What is made of one image.

    Args:
        top: of the part that is cut out, in pixels of the image.
        left: of that part.
        height: of that part.
        width: of that part.
        flip: mirror it.
        shift: pixels by which it is moved down and to the right, over black.
        shade: how its colours change.
        erased: (top, left, height, width) that is made mean grey, in pixels of what comes out.
    """

    top: float
    left: float
    height: float
    width: float
    flip: bool = False
    shift: tuple[int, int] = (0, 0)
    shade: ColorParams | None = None
    erased: tuple[int, int, int, int] | None = None


class _Transform(ABC):
    """Cuts a part out of an image and resizes it; what part, subclasses say."""

    size: int
    smooth: bool
    fill: Tensor

    @abstractmethod
    def draw(self, height: int, width: int, rng: random.Random) -> CropParams:
        """Choose what will be made of an image of a size, in pixels."""

    def of_jpeg(self, data: Any, header: JpegHeader, rng: random.Random) -> Tensor:
        """Decode a JPEG and transform it, drawing from `rng`; large parts are decoded no larger than needed.

        Args:
            data: the file, with the buffer protocol.
            header: of it.
            rng: of the sample.

        Raises:
            ValueError: it is damaged.
        """
        look = self.draw(header.height, header.width, rng)
        needed = self.size / min(look.height, look.width)
        pixels = decode_jpeg(data, header, needed, exact=self.smooth)
        return self._make(pixels, look, (pixels.shape[0] / header.height, pixels.shape[1] / header.width))

    def __call__(self, image: Tensor, rng: random.Random) -> Tensor:
        """Transform one image, drawing from `rng`."""
        done = self._make(image.permute(1, 2, 0).numpy(), self.draw(image.shape[1], image.shape[2], rng))
        return done.clone() if done.data_ptr() == image.data_ptr() else done

    def _make(self, pixels: np.ndarray, look: CropParams, scale: tuple[float, float] = (1.0, 1.0)) -> Tensor:
        """Make of an image what was drawn for it.

        Args:
            pixels: uint8 (height, width, 3).
            look: from `draw`.
            scale: height and width of `pixels` over those that `draw` was told.
        """
        height, width = pixels.shape[:2]
        top = min(round(look.top * scale[0]), height - 1)
        left = min(round(look.left * scale[1]), width - 1)
        bottom = max(top + 1, round((look.top + look.height) * scale[0]))
        right = max(left + 1, round((look.left + look.width) * scale[1]))
        # In numpy: each operation of torch would let go of the interpreter lock, and wait to have it back.
        part = pixels[top:bottom, left:right]
        if part.shape[:2] != (self.size, self.size):
            part = resize(part, self.size, self.smooth)
        if look.shift != (0, 0):
            part = _shifted(part, *look.shift)
        if look.flip:
            part = cv2.flip(part, 1)
        made = torch.from_numpy(part.transpose(2, 0, 1))
        if look.shade is not None:
            made = look.shade.of(made)
        if look.erased is not None:
            top, left, height, width = look.erased
            made = made.clone()
            made[:, top : top + height, left : left + width] = self.fill
        return made


class EvalTransform(_Transform):
    """Cuts out the centre and resizes it; nothing is random.

    Args:
        size: side of the square that comes out, pixels.
        center_crop: share of the shorter side that is kept, above 0, up to 1. It says nothing of pixels, so that
            validation sees what training sees at any `size`. For photos of ImageNet 0.875 is usual: 224 of 256.
        smooth: decode and resize as exactly as Pillow and torchvision; otherwise a quarter faster, see `resize`.

    Raises:
        ValueError: `size` is not positive, or `center_crop` is no such share.
    """

    def __init__(self, size: int, center_crop: float = 1.0, smooth: bool = True) -> None:
        self.smooth = smooth
        self.size = _positive("image_size", size)
        if not 0 < center_crop <= 1:
            raise ValueError(
                f"center_crop is {center_crop}, and is a share of the image's shorter side, above 0 and up to 1: type "
                "data.center_crop=0.875"
            )
        self.center_crop = center_crop

    def draw(self, height: int, width: int, rng: random.Random) -> CropParams:
        """Choose the centre; `rng` is not used."""
        side = max(1, round(min(height, width) * self.center_crop))
        return CropParams(round((height - side) / 2), round((width - side) / 2), side, side)


class TrainTransform(_Transform):
    """Cuts out a random part, resizes it, mirrors some and changes colours: the usual augmentation of photos.

    Args:
        size: side of the square that comes out, pixels.
        scale: smallest and largest share of the image's area that is cut out, 0..1.
        ratio: smallest and largest width:height of what is cut out.
        flip: chance of a mirror image, 0..1. Leave it 0 where left and right mean something, as in digits.
        pad_crop: instead of the cut by `scale` and `ratio`: resize the whole image, and move it by up to so many
            pixels over black, as is usual for CIFAR. 0: off.
        brightness: largest change of the factor 1 of the brightness, 0..1, as torchvision's ColorJitter has it.
        contrast: the same of the contrast.
        saturation: the same of the saturation.
        hue: largest turn of the hue, as a share of the circle, 0..0.5.
        erase: chance that a rectangle is made mean grey, 0..1, as torchvision's RandomErasing.
        fill: that grey, 0..1 for each channel.
        smooth: as of `EvalTransform`.

    Raises:
        ValueError: a value out of its range.
    """

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
        self.smooth = smooth
        self.size = _positive("image_size", size)
        self.scale = _range("crop_scale", scale, at_most=1.0)
        self.ratio = _range("crop_ratio", ratio, at_most=math.inf)
        self.flip = _chance("flip", flip)
        self.erase = _chance("erase", erase)
        if pad_crop < 0:
            raise ValueError(f"pad_crop is {pad_crop}, and is a width in pixels: type data.pad_crop=4 or 0")
        self.pad_crop = pad_crop
        self.jitter = Jitter(brightness, contrast, saturation, hue)
        self.fill = (torch.tensor(tuple(fill)) * 255).round().to(torch.uint8).view(3, 1, 1)

    def draw(self, height: int, width: int, rng: random.Random) -> CropParams:
        """Choose the part, whether it is mirrored, its colours, and what is erased."""
        top, left, shift = 0, 0, (0, 0)
        if self.pad_crop:
            shift = rng.randint(-self.pad_crop, self.pad_crop), rng.randint(-self.pad_crop, self.pad_crop)
        else:
            top, left, height, width = _random_box(height, width, self.scale, self.ratio, rng)
        flip = rng.random() < self.flip
        shade = self.jitter.draw(rng) if self.jitter else None
        erased = _random_box(self.size, self.size, _ERASED_AREA, _ERASED_RATIO, rng) if self._erases(rng) else None
        return CropParams(top, left, height, width, flip, shift, shade, erased)

    def _erases(self, rng: random.Random) -> bool:
        return bool(self.erase) and rng.random() < self.erase


_ERASED_AREA, _ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)
"""Of torchvision's RandomErasing, from Zhong et al., Random Erasing Data Augmentation (arXiv 1708.04896)."""


def resize(pixels: np.ndarray, size: int, smooth: bool = True) -> np.ndarray:
    """Resize an image to a square.

    Args:
        pixels: uint8 (height, width, 3).
        size: side of the square, pixels.
        smooth: average over all pixels that become one, as torchvision does; otherwise over the nearest four, which
            takes half the time and looks rough from twice the size on: there it is smooth in any case.
    """
    if not smooth and min(pixels.shape[:2]) < 2 * size:
        return cv2.resize(pixels, (size, size))
    # Unsqueezed so that torch sees channels last, and need not rearrange all pixels before and after.
    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    resized = F.interpolate(batch, size=(size, size), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def _shifted(pixels: np.ndarray, down: int, right: int) -> np.ndarray:
    """Move an image over black."""
    moved = np.zeros_like(pixels)
    size = len(pixels)
    moved[_overlap(down, size), _overlap(right, size)] = pixels[_overlap(-down, size), _overlap(-right, size)]
    return moved


def _overlap(shift: int, size: int) -> slice:
    return slice(min(size, max(0, shift)), max(0, min(size, size + shift)))


def _random_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], rng: random.Random
) -> tuple[int, int, int, int]:
    """Draw (top, left, height, width) of a part of an image."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            break
    else:  # an image so long that hardly any such part fits: the largest square
        box_width = box_height = min(height, width)
    return rng.randint(0, height - box_height), rng.randint(0, width - box_width), box_height, box_width


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} is {value}, and must be at least 1 pixel: type data.{name}=32")
    return value


def _chance(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}, and is a chance from 0 to 1: type data.{name}=0.5")
    return value


def _range(name: str, bounds: Sequence[float], at_most: float) -> tuple[float, float]:
    low, high = (*bounds, *(math.nan, math.nan))[:2]
    if len(bounds) != 2 or not 0 < low <= high <= at_most:
        raise ValueError(f"{name} is {list(bounds)}, and must be two rising numbers above 0: data.{name}=[0.8,1.0]")
    return low, high
