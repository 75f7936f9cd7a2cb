"""Decoding of images."""

from __future__ import annotations

import io

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

IMAGE_EXTENSIONS = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)


def decode(data: bytes | bytearray) -> Tensor:
    """Decode an image file of any usual format, told by its content and not by its name.

    Grey, palette, CMYK and 16-bit images become RGB; transparency is dropped, and of an animation the first
    frame is taken. An EXIF orientation is not applied, as in torchvision's ImageFolder.

    Args:
        data: the file.

    Returns:
        uint8 (3, height, width), RGB.

    Raises:
        ValueError: it is no image, or a damaged one.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            rgb = _sixteen_to_eight_bits(image).convert("RGB")
    except UnidentifiedImageError:
        start = f"starts with {bytes(data[:16])!r}" if data else "is empty"
        raise ValueError(f"not an image: the file {start}") from None
    except Exception as error:  # the readers of the many formats raise almost anything on damaged files
        raise ValueError(f"damaged image: {error}") from None
    # A copy, as torch wants memory that it may write to.
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1).contiguous()


def _sixteen_to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale grey of 16 bits a pixel, which convert() would cut off at 255; leave other images as they are."""
    if not image.mode.startswith("I"):
        return image
    return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
