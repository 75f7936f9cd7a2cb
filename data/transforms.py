"""From an image of any size to one of a given size, with or without chance.

A transform is called as `transform(image, rng)`: image uint8 (3, height, width), rng the sample's own
`random.Random`, so that what it draws does not depend on threads, ranks or the order of samples. It returns
a new uint8 tensor and leaves its input as it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from torch import Tensor
from torchvision.transforms.v2 import functional as F


class EvalTransform:
    """Resizes the shorter side and cuts out the centre; nothing is random.

    Args:
        size: side of the square that comes out, pixels.
        resize: length of the shorter side before the cut, pixels; None: `size`, which keeps the most.
            For photos of ImageNet 256 with a size of 224 is usual.

    Raises:
        ValueError: a size is not positive, or `resize` is smaller than `size`.
    """

    def __init__(self, size: int, resize: int | None = None) -> None:
        self.size = _positive("image_size", size)
        self.resize = size if resize is None else _positive("resize", resize)
        if self.resize < self.size:
            raise ValueError(
                f"resize is {self.resize} and image_size {self.size}: an image can't be cut to more than "
                f"it was resized to; type data.resize={self.size} or more"
            )

    def __call__(self, image: Tensor, rng: random.Random) -> Tensor:
        """Transform one image; `rng` is not used."""
        height, width = image.shape[-2:]
        factor = self.resize / min(height, width)
        scaled = [max(self.size, round(height * factor)), max(self.size, round(width * factor))]
        if scaled != [height, width]:
            image = F.resize(image, scaled, antialias=True)
        return F.center_crop(image, [self.size, self.size]).contiguous()


class TrainTransform:
    """Cuts out a random part, resizes it, and mirrors some: the usual augmentation of photos.

    Args:
        size: side of the square that comes out, pixels.
        scale: smallest and largest share of the image's area that is cut out, 0..1.
        ratio: smallest and largest width:height of what is cut out.
        flip: chance of a mirror image, 0..1. Leave it 0 where left and right mean something, as in digits.
        pad_crop: instead of the cut by `scale` and `ratio`: resize the whole image, add a black border of so
            many pixels, and cut `size` out of it at a random place, as is usual for CIFAR. 0: off.

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
    ) -> None:
        self.size = _positive("image_size", size)
        self.scale = _range("crop_scale", scale, at_most=1.0)
        self.ratio = _range("crop_ratio", ratio, at_most=math.inf)
        if not 0 <= flip <= 1:
            raise ValueError(f"flip is {flip}, and is a chance from 0 to 1: type data.flip=0.5")
        if pad_crop < 0:
            raise ValueError(f"pad_crop is {pad_crop}, and is a width in pixels: type data.pad_crop=4 or 0")
        self.flip = flip
        self.pad_crop = pad_crop

    def __call__(self, image: Tensor, rng: random.Random) -> Tensor:
        """Transform one image, drawing from `rng`."""
        size = [self.size, self.size]
        if self.pad_crop:
            image = F.pad(F.resize(image, size, antialias=True), [self.pad_crop])
            top, left = rng.randint(0, 2 * self.pad_crop), rng.randint(0, 2 * self.pad_crop)
            image = F.crop(image, top, left, self.size, self.size)
        else:
            box = _random_box(image.shape[-2], image.shape[-1], self.scale, self.ratio, rng)
            image = F.resized_crop(image, *box, size, antialias=True)
        if rng.random() < self.flip:
            image = image.flip(-1)
        return image.contiguous()


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


def _range(name: str, bounds: Sequence[float], at_most: float) -> tuple[float, float]:
    low, high = (*bounds, *(math.nan, math.nan))[:2]
    if len(bounds) != 2 or not 0 < low <= high <= at_most:
        raise ValueError(f"{name} is {list(bounds)}, and must be two rising numbers above 0: data.{name}=[0.8,1.0]")
    return low, high
