"""Reads labelled images from a bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image

from ddp_hydra.data import image_folder


class S3ImageFolder(image_folder.S3ImageFolder):
    """Labelled images of a bucket, with one folder per class, as PIL images or what a transform makes of them.

    Args:
        s3_bucket: name of the bucket; or file:///folder.
        s3_prefix: the folder of the class folders.
        transform: takes a PIL image (RGB), as torchvision's do; None: the image itself.
        target_transform: takes the class number.
        anon: read a public bucket without credentials.
        more: arguments of `ddp_hydra.data.S3ImageFolder`: endpoint_url, threads, max_bad_fraction and more.

    Attributes:
        classes: names of the classes; `class_to_idx`: {name: number}.
    """

    def __init__(
        self,
        s3_bucket: str,
        s3_prefix: str,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        anon: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(s3_bucket, s3_prefix, transform or as_it_is, target_transform, anon=anon, **more)

    @property
    def all_files(self) -> list[str]:
        """Return the keys of all images, sorted."""
        return list(self._keys)


def as_it_is(image: Image.Image) -> Image.Image:
    """Return the image."""
    return image
