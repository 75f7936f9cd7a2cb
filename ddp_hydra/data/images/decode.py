"""Decoding of images."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features
from torch import Tensor

IMAGE_EXTENSIONS = frozenset(
    [".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"]
    + ([".avif"] if "avif" in features.modules and features.check("avif") else [])  # Pillow has it since 11.3
)
MOST_PIXELS = 178_956_970
"""Pillow refuses to decode larger images, half a gigabyte of memory each, and so do we."""

_APP1, _PIXELS = 0xE1, 0xDA
"""Kinds of JPEG segments: of EXIF and XMP, and the last one."""
_FAST_COLOURS = ("YCbCr", "Gray", "RGB")
_SHRINKS = (8, 4, 2, 1)
_EXACT_SHRINKS = {"411": 1, "422": 4, "440": 4}
"""How far a JPEG may be shrunk as it is decoded, by how its colours are stored: with much less height than width or
the other way round they get coarser than the pixels that come out, and whole levels off."""


@dataclass(frozen=True)
class JpegHeader:
    """What a JPEG says before its pixels.

    Args:
        height: in pixels, as the image is to be seen.
        width: in pixels, as the image is to be seen.
        orientation: of EXIF, 1..8; 1: as it is stored.
        sampling: how its colours are stored, e.g. "420".
    """

    height: int
    width: int
    orientation: int = 1
    sampling: str = ""


def read_jpeg_header(data: Any) -> JpegHeader | None:
    """Read the size of a JPEG, and how it is turned; None of other files, and of odd kinds of JPEG.

    Args:
        data: the file, with the buffer protocol.
    """
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    try:
        height, width, colours, sampling = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if colours not in _FAST_COLOURS:
        return None
    orientation = _orientation(data) if _may_be_turned(data) else 1
    if orientation >= 5:
        height, width = width, height
    return JpegHeader(height, width, orientation, sampling)


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
        ValueError: it is damaged, or too large.
    """
    most = _EXACT_SHRINKS.get(header.sampling, 8) if exact else 8
    shrink = next(shrink for shrink in _SHRINKS if shrink == 1 or (at_least * shrink <= 1 and shrink <= most))
    height, width = (header.width, header.height) if header.orientation >= 5 else (header.height, header.width)
    if height * width > MOST_PIXELS * shrink**2:
        raise ValueError(
            f"too large an image: {width:,} x {height:,} pixels, and at most {MOST_PIXELS:,} are decoded at a time: "
            "make it smaller, or give a transform that says its size, so that no more is decoded than it needs"
        )
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

    Of whole numbers of 16 or 32 bits the values 0 to 65535 become 0 to 255, by their upper 8 bits: cut off at 255, as
    Pillow's convert() does, nearly all would be white. So it is with 32 bits, too, as instruments and Pillow store 16
    in them; what is above is white. Fractions have no range that all agree on, and are taken as 0 to 255.

    Args:
        data: the file, with the buffer protocol.

    Returns:
        uint8 (3, height, width), RGB; in memory the three values of a pixel lie side by side.

    Raises:
        ValueError: it is no image, a damaged one, or one too large.
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


def _may_be_turned(data: Any) -> bool:
    """Whether any of the segments before the pixels of a JPEG may say how it is turned, in EXIF or XMP."""
    view, at = memoryview(data), 2
    while at + 4 <= len(view) and view[at] == 0xFF:
        kind = view[at + 1]
        if kind == _PIXELS:
            return False
        if kind == 0xFF:  # a byte that fills
            at += 1
            continue
        end = at + 2 + (view[at + 2] << 8 | view[at + 3])
        if kind == _APP1:
            segment = bytes(view[at + 4 : end])
            if segment.startswith(b"Exif\0\0") or b"tiff:Orientation" in segment:
                return True
        at = end
    return True  # an odd file, of which Pillow may know


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
    """Scale grey of 16 or 32 bits a pixel as `decode` says; leave other images as they are."""
    if not image.mode.startswith("I"):
        return image
    return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
