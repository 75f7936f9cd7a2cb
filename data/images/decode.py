"""Decoding of images."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

IMAGE_EXTENSIONS = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)

_EXIF_IN_FIRST = 4096
_FAST_COLOURS = ("YCbCr", "Gray", "RGB")
_SHRINKS = (8, 4, 2, 1)


@dataclass(frozen=True)
class JpegHeader:
    """What a JPEG says before its pixels.

    Args:
        height: in pixels, as the image is to be seen.
        width: in pixels, as the image is to be seen.
        orientation: of EXIF, 1..8; 1: as it is stored.
    """

    height: int
    width: int
    orientation: int = 1


def read_jpeg_header(data: Any) -> JpegHeader | None:
    """Read the size of a JPEG, and how it is turned; None of other files, and of odd kinds of JPEG.

    Args:
        data: the file, with the buffer protocol.
    """
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if colours not in _FAST_COLOURS:
        return None
    orientation = _orientation(data) if b"Exif\0\0" in bytes(data[:_EXIF_IN_FIRST]) else 1
    return JpegHeader(width, height, orientation) if orientation >= 5 else JpegHeader(height, width, orientation)


def decode_jpeg(data: Any, header: JpegHeader, at_least: float = 1.0, exact: bool = True) -> np.ndarray:
    """Decode a JPEG, of which a smaller size may do.

    Args:
        data: the file, with the buffer protocol.
        header: of it.
        at_least: share of its height and width that is needed; what comes is 1, 1/2, 1/4 or 1/8 of them.
        exact: the pixels that Pillow would give; otherwise nearly those, a tenth faster.

    Returns:
        uint8 (height, width, 3), RGB.

    Raises:
        ValueError: it is damaged.
    """
    shrink = next(shrink for shrink in _SHRINKS if shrink == 1 or at_least * shrink <= 1)
    height, width = (header.width, header.height) if header.orientation >= 5 else (header.height, header.width)
    least = {} if shrink == 1 else {"min_height": -(-height // shrink), "min_width": -(-width // shrink)}
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", fastdct=not exact, fastupsample=not exact, **least)
    except ValueError:
        return _decode_any(data)  # the thorough decoder may know better, or can say what is wrong
    return _upright(pixels, header.orientation)


def decode(data: Any) -> Tensor:
    """Decode an image file of any usual format, told by its content and not by its name.

    Grey, palette, CMYK and 16-bit images become RGB; transparency is dropped, and of an animation the first
    frame is taken. A photo of which EXIF says that it is turned is turned upright.

    Args:
        data: the file, with the buffer protocol.

    Returns:
        uint8 (3, height, width), RGB; in memory the three values of a pixel lie side by side.

    Raises:
        ValueError: it is no image, or a damaged one.
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


def _orientation(data: Any) -> int:
    try:
        with Image.open(io.BytesIO(data)) as image:
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # EXIF is written by every kind of device, and no reason to lose a photo
        return 1
    return orientation if orientation in range(1, 9) else 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Turn and mirror as EXIF's orientation says."""
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
    """Scale grey of 16 bits a pixel, which convert() would cut off at 255; leave other images as they are."""
    if not image.mode.startswith("I"):
        return image
    return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
