"""Decodes images and changes pixels: colors at random, all in one step; normalisation; transforms of a PIL image."""

from __future__ import annotations

import inspect
import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features
from torch import Tensor, nn

from ddp_hydra.data.names import check_range
from ddp_hydra.data.threads import is_thread_safe

IMAGE_EXTENSIONS = frozenset(
    [".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"]
    + ([".avif"] if "avif" in features.modules and features.check("avif") else [])  # Pillow has it since 11.3
)
MOST_PIXELS = 178_956_970
"""Larger images need half a gigabyte of memory each: Pillow refuses to decode them, and so does this module."""

_APP1, _PIXELS = 0xE1, 0xDA
"""Kinds of JPEG segments: EXIF or XMP, and the pixels, which come last."""
_FAST_COLORS = ("YCbCr", "Gray", "RGB")
_SHRINKS = (8, 4, 2, 1)
_EXACT_SHRINKS = {"411": 1, "422": 4, "440": 4}
"""How far a JPEG may be shrunk while it is decoded, by its chroma sampling. If the chroma has a much lower resolution
in one direction than in the other, it would become coarser than the decoded pixels, and whole levels wrong."""


@dataclass(frozen=True)
class JpegHeader:
    """The header of a JPEG; height and width are those of the upright image."""

    height: int
    width: int
    orientation: int = 1  # of EXIF, 1..8; 1: the pixels are stored upright
    sampling: str = ""  # of the chroma, as "420"


def read_jpeg_header(data: Any) -> JpegHeader | None:
    """Return the header of a JPEG, or None for other files and for unusual kinds of JPEG."""
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    try:
        height, width, colors, sampling = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if colors not in _FAST_COLORS:
        return None
    orientation = _orientation(data) if _may_be_rotated(data) else 1
    if orientation >= 5:
        height, width = width, height
    return JpegHeader(height, width, orientation, sampling)


def decode_jpeg(data: Any, header: JpegHeader, at_least: float = 1.0, exact: bool = True) -> np.ndarray:
    # Return the pixels, uint8 (height, width, 3).
    # at_least: share of height and width that is needed; the result has 1, 1/2, 1/4 or 1/8 of them.
    # exact: return the pixels that Pillow would; otherwise nearly these, a tenth faster.
    most = _EXACT_SHRINKS.get(header.sampling, 8) if exact else 8
    shrink = next(shrink for shrink in _SHRINKS if shrink == 1 or (at_least * shrink <= 1 and shrink <= most))
    height, width = (header.width, header.height) if header.orientation >= 5 else (header.height, header.width)
    if height * width > MOST_PIXELS * shrink**2:
        raise ValueError(
            f"too large an image: {width:,} x {height:,} pixels, more than {MOST_PIXELS:,}: give its transform a `size`"
        )
    least = {} if shrink == 1 else {"min_height": -(-height // shrink), "min_width": -(-width // shrink)}
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", fastdct=not exact, fastupsample=not exact, **least)
    except ValueError:
        return _decode_any(data)  # Pillow may be able to decode it, or can say what is wrong
    return _upright(pixels, header.orientation)


def decode(data: Any) -> Tensor:
    """Decode an image file of any usual format, which its content says: uint8 (3, height, width), channels last.

    Grey, palette, CMYK and 16-bit images become RGB. Transparency is dropped. The first frame of an animation is used.
    A photo is rotated upright as its EXIF says. ValueError: the file is not an image, is damaged, or is too large.
    """
    header = read_jpeg_header(data)
    pixels = decode_jpeg(data, header) if header else _decode_any(data)
    return torch.from_numpy(pixels.transpose(2, 0, 1))


def _decode_any(data: Any) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data)) as image:
            upright = ImageOps.exif_transpose(image)
            return np.array(_sixteen_to_eight_bits(upright).convert("RGB"))
    except UnidentifiedImageError:
        start = bytes(data[:16])
        raise ValueError(f"not an image: the file {f'starts with {start!r}' if start else 'is empty'}") from None
    except Exception as error:  # the readers of the many formats raise almost anything on damaged files
        raise ValueError(f"damaged image: {error}") from None


def _may_be_rotated(data: Any) -> bool:
    # Walk over the segments before the pixels: a search in the whole file took 5 % of the time of an image.
    view, at = memoryview(data), 2
    while at + 4 <= len(view) and view[at] == 0xFF:
        kind = view[at + 1]
        if kind == _PIXELS:
            return False
        if kind == 0xFF:  # padding
            at += 1
            continue
        end = at + 2 + (view[at + 2] << 8 | view[at + 3])
        if kind == _APP1:
            segment = bytes(view[at + 4 : end])
            if segment.startswith(b"Exif\0\0") or b"tiff:Orientation" in segment:
                return True
        at = end
    return True  # an unusual file that Pillow may understand


def _orientation(data: Any) -> int:
    try:
        with Image.open(io.BytesIO(data)) as image:
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF is frequent, and no reason to lose a photo
        return 1
    return orientation if orientation in range(1, 9) else 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _sixteen_to_eight_bits(image: Image.Image) -> Image.Image:
    # Pillow's convert() would clip integers of 16 or 32 bits at 255, and nearly all pixels would be white: 0 to 65535
    # become 0 to 255. Instruments and Pillow store 16 bits in 32, too; larger values become white. Floating-point
    # values are taken as 0 to 255.
    if not image.mode.startswith("I"):
        return image
    return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")


_GREY = torch.tensor([0.299, 0.587, 0.114])
# From RGB to brightness and two axes of color: in this space a change of hue is a rotation.
_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_RGB = torch.linalg.inv(_YIQ)


@dataclass(frozen=True)
class ColorParams:
    """The color changes of one image: first brightness, then contrast, saturation and hue.

    All four are linear in the colors, and contrast also needs the image's mean. So they are one matrix and one offset,
    and the result is clipped once. The hue is rotated in YIQ, as NVIDIA's DALI does.
    """

    brightness: float  # factor
    contrast: float  # factor of the distance from the image's mean grey
    saturation: float  # factor of the distance from grey
    hue: float  # rotation, as a share of the circle

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
    """Draws color changes; its arguments are the largest ones, as of `TrainTransform`."""

    def __init__(self, brightness: float, contrast: float, saturation: float, hue: float) -> None:
        self.factors, self.hue = (brightness, contrast, saturation), hue
        for name, value in zip(("brightness", "contrast", "saturation"), self.factors, strict=True):
            check_range(name, value, 0, 1, example=0.1)
        check_range("hue", hue, 0, 0.5, example=0.1)

    def __bool__(self) -> bool:
        return any(self.factors) or bool(self.hue)

    def draw(self, rng: random.Random) -> ColorParams:
        brightness, contrast, saturation = (rng.uniform(1 - factor, 1 + factor) for factor in self.factors)
        return ColorParams(brightness, contrast, saturation, rng.uniform(-self.hue, self.hue))


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    # images: uint8 (batch, 3, height, width), in any memory format.
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
    """Gives a transform each image as PIL knows it."""

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
