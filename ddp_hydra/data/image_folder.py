"""Labelled images in a bucket, with one folder per class."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ddp_hydra.data import demo_server
from ddp_hydra.data.holdout import check, is_of
from ddp_hydra.data.images.decode import IMAGE_EXTENSIONS
from ddp_hydra.data.images.listing import Listing, kinds_of, known_size, list_images_once
from ddp_hydra.data.images.stored import StoredImages
from ddp_hydra.data.images.string_array import StringArray
from ddp_hydra.data.user_cache import user_cache
from ddp_hydra.storage import Store


class S3ImageFolder(StoredImages):
    """Labelled images of any S3-compatible store or of a local folder; the class of an image is its folder.

    The images are listed once, here; an incomplete listing is an error. Files with other extensions are skipped.

    Args:
        bucket: name of the bucket, or file:///folder; None: an embedded S3 server on this machine, with
            scikit-learn's handwritten digits (32x32 pixels) under "train" and "val".
        prefix: the folder of the class folders, e.g. "imagenet/train"; "": the whole bucket.
        transform: as in `ImageDataset`, and so is target_transform.
        classes_from: a prefix whose folders with images are the classes; None: those under `prefix`. For a validation
            set, give the prefix of the training set, so that both use the same class numbers.
        holdout: share of the images that is kept for validation, 0..1, chosen by a hash of each key.
        split: with a holdout, "train": all other images; "val": the images that are held out.
        labelled: False: all images under `prefix`, whose classes are not known, to be predicted.
        listing_max_age_s: use a listing on this machine's disk that is not older than this; 0: list each time.
        images: arguments of `StoredImages` (endpoint_url, region, anon and more) and of `ImageDataset` (threads,
            cache_mb, max_bad_fraction and more).

    Attributes:
        skipped: how many objects under the prefix are not images, by extension.

    Raises:
        ValueError: an argument is out of its range, or an image has a class that `classes_from` does not have.
        FileNotFoundError: there is no such bucket, or there are no images under the prefix.
        PermissionError: credentials are missing or wrong.
        ConnectionError: the store is not reachable.
        ModuleNotFoundError: the embedded server needs a package that is not installed.
    """

    def __init__(
        self,
        bucket: str | None = None,
        prefix: str = "",
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        *,
        classes_from: str | None = None,
        holdout: float = 0.0,
        split: str = "train",
        labelled: bool = True,
        listing_max_age_s: float = 0.0,
        **images: Any,
    ) -> None:
        check(holdout, split)
        super().__init__(transform=transform, target_transform=target_transform, **images)
        self.prefix, self.labelled = prefix.strip("/"), labelled
        self._owns_server = False
        self._embedded_on: str | None = None
        if bucket is None:
            self._store: Store = self._embedded()
        else:
            self._store = self.access.bucket(bucket)
        try:
            listing = self._list(self.prefix, listing_max_age_s)
            if not len(listing.keys):
                raise FileNotFoundError(self._nothing_found(listing.others))
            self.skipped = listing.others
            self._keys, self._sizes = listing.keys, listing.sizes
            self._label(classes_from, listing_max_age_s)
            if holdout:
                self._keep([is_of(key, holdout, split) for key in self._keys])
        except BaseException:
            self.close()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_owns_server": False}

    def _embedded(self) -> Store:
        if (endpoint_url := self.access.endpoint_url) is not None:
            raise ValueError(
                f"endpoint_url is {endpoint_url!r}, and no bucket is given: type data.bucket=..., or leave "
                "out data.endpoint_url to use the embedded digits"
            )
        (self.access.endpoint_url, self.access.credentials), self.access.region = demo_server.acquire(), "us-east-1"
        self._owns_server = True
        self._embedded_on = socket.gethostname()
        return self.access.bucket(demo_server.BUCKET)

    def _list(self, prefix: str, max_age_s: float) -> Listing:
        """List the images under a prefix, or take a listing from the disk."""
        return list_images_once(self._store, prefix, max_age_s, user_cache() / "listings", self.labelled)

    def _label(self, classes_from: str | None, max_age_s: float) -> None:
        """Number the classes, and set the targets."""
        if not self.labelled:
            self.classes, self.class_to_idx = [], {}
            self.targets = np.full(len(self._keys), -1, np.int32)
            return
        folders = _folders_of(self._keys)
        found = known = set(folders)
        origin = self.prefix if classes_from is None else classes_from.strip("/")
        # Mostly, both have the same folders: that is quickly seen, and a second listing may take long.
        if origin != self.prefix and found != set(self._store.folders(origin)):
            known = set(_folders_of(self._list(origin, max_age_s).keys))
        self.classes = sorted(known)
        unknown = sorted(found - known)
        if unknown:
            raise ValueError(
                f"{self.where()} has classes that {classes_from!r} does not have: "
                f"{', '.join(unknown[:10])}; check data.train_prefix=... and data.val_prefix=..."
            )
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        self.targets = np.fromiter((self.class_to_idx[folder] for folder in folders), np.int32, len(folders))

    def _keep(self, wanted: list[bool]) -> None:
        """Drop all images but the wanted ones; keep all classes."""
        if not any(wanted):
            raise ValueError(f"no images of {self.where()} are left in this split: type another data.holdout=0.1")
        self._keys = StringArray([key for key, is_wanted in zip(self._keys, wanted, strict=True) if is_wanted])
        self._sizes, self.targets = self._sizes[wanted], self.targets[wanted]

    def _nothing_found(self, others: Counter[str]) -> str:
        where = self.where()
        setting = "data.train_prefix=... or data.val_prefix=..."
        if others:
            return (
                f"no images in class folders under {where}, only: {kinds_of(others)}. Images are "
                f"{where}/<class>/<file>.jpg or {', '.join(sorted(IMAGE_EXTENSIONS - {'.jpg'}))}: check "
                f"{setting}"
            )
        parent = self.prefix
        folders: list[str] = []
        while parent and not folders:
            parent = parent.rpartition("/")[0]
            folders = self._store.folders(parent)
        there = f"{self._store.shown()}/{parent}"
        if not folders:
            return f"there is nothing under {where}, nor a folder in {there}: check data.bucket and {setting}"
        names = ", ".join(folders[:10]) + (f" and {len(folders) - 10} more" if len(folders) > 10 else "")
        return f"there is nothing under {where}; the folders in {there} are: {names}. Check {setting}"

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Return (key, class number) of each sample, as torchvision's ImageFolder does."""
        return list(zip(self._keys, self.targets.tolist(), strict=True))

    def where(self) -> str:
        """Return the URL of the class folders."""
        return f"{self._store.shown()}/{self.prefix}"

    def name(self, index: int) -> str:
        """Return the key of a sample."""
        return self._keys[index]

    def n_bytes(self, index: int) -> int:
        """Return the size of a sample's file when it was listed, bytes."""
        return int(self._sizes[index])

    def fetch(self, index: int) -> Any:
        """Return the file of a sample; raise as `ImageDataset.fetch` does."""
        try:
            return self._store.get(self._keys[index], known_size(self.n_bytes(index)))
        except ConnectionError as error:
            if self._embedded_on not in (None, socket.gethostname()):
                raise ConnectionError(
                    f"the embedded S3 server runs on {self._embedded_on}, and {socket.gethostname()} can't "
                    "reach it: give a bucket that all hosts can read, data.bucket=..."
                ) from None
            raise error from None

    def close(self) -> None:
        """Stop the threads, and the embedded server if nobody else uses it."""
        super().close()
        if self._owns_server:
            self._owns_server = False
            demo_server.release()


def _folders_of(keys: Iterable[str]) -> list[str]:
    """Return the name of the folder that each key is in."""
    return [key.rsplit("/", 2)[-2] for key in keys]
