"""Decode JPEGs in memory to crops of 224 in threads with the bare decoder, and discard them."""

from __future__ import annotations

from pathlib import Path

import cv2
import data_common as common
import simplejpeg

cv2.setNumThreads(0)
SHORTER = 256


def decoded(data: bytes) -> int:
    """Decode, cut out what becomes the crop, and make it smaller."""
    pixels = simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True)
    height, width = pixels.shape[:2]
    side = round(min(height, width) * common.SIDE / SHORTER)
    top, left = (height - side) // 2, (width - side) // 2
    part = pixels[top : top + side, left : left + side]
    return len(cv2.resize(part, (common.SIDE, common.SIDE), interpolation=cv2.INTER_LINEAR))


def main() -> None:
    """Decode the photos of a folder."""
    arguments = common.arguments()
    files = sorted(Path(arguments.folder).rglob("*.jpg"))[:: common.IMAGES // arguments.images[0]]
    images = [file.read_bytes() for file in files]
    common.say([common.in_threads(decoded, images, arguments.threads[0])])


if __name__ == "__main__":
    main()
