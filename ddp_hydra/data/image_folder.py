"""Labelled images in a bucket, with one folder per class."""

from __future__ import annotations

import logging
import os
import socket
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ddp_hydra.data import demo_server
from ddp_hydra.data.images.dataset import StoredImages
from ddp_hydra.data.images.listing import StringArray, holds_images, kinds_of, list_images_once
from ddp_hydra.data.names import check, class_of, is_leftover, is_of
from ddp_hydra.storage import LocalFolder, Store, bare_url
from ddp_hydra.storage.urls import as_text, local_path

_LOG = logging.getLogger(__name__)


class S3ImageFolder(StoredImages):
    """Labelled images of any S3-compatible store or of a local folder, one folder per class.

    The class of an image is the first folder below `prefix`, and the images have the order of torchvision's
    ImageFolder. They are listed once, here; an incomplete listing is an error. Files with other extensions are skipped,
    and so is what systems and programs leave behind (`names.is_leftover`).

    Args:
        bucket: name of the bucket, path of a local folder with a slash in it or as a `Path`, or a URL of fsspec; None:
            an embedded S3 server on this machine, with scikit-learn's handwritten digits (32x32 pixels) under "train"
            and "val".
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
        ValueError: an argument is out of its range, an image has a class that `classes_from` does not have, or all
            class folders are in one folder.
        FileNotFoundError: there is no such bucket, or there are no images under the prefix.
        PermissionError: credentials are missing or wrong.
        ConnectionError: the store is not reachable.
        ModuleNotFoundError: the embedded server needs a package that is not installed.
    """

    thread_safe = True

    def __init__(
        self,
        bucket: str | os.PathLike[str] | None = None,
        prefix: str | os.PathLike[str] = "",
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        *,
        classes_from: str | os.PathLike[str] | None = None,
        holdout: float = 0.0,
        split: str = "train",
        labelled: bool = True,
        listing_max_age_s: float = 0.0,
        **images: Any,
    ) -> None:
        check(holdout, split)
        bucket = str(local_path(os.fspath(bucket))) if isinstance(bucket, os.PathLike) else bucket
        super().__init__(transform=transform, target_transform=target_transform, **images)
        self.prefix, self.labelled = _clean(as_text(prefix)), labelled
        self._owns_server = False
        self._embedded_on: str | None = None
        self._store = self._embedded() if bucket is None else self.access.bucket(bucket)
        if bucket is None:  # it is listed at once, and would have another listing for each port
            listing_max_age_s = 0.0
        try:
            try:
                listing = list_images_once(self._store, self.prefix, listing_max_age_s, self.labelled)
            except (FileNotFoundError, PermissionError, ConnectionError) as error:
                raise type(error)(f"{error}{_other_meaning(bucket)}") from None
            if not len(listing.keys):
                raise FileNotFoundError(self._nothing_found(listing.others))
            self.skipped = listing.others
            self._keys, self._sizes = listing.keys, listing.sizes
            self._label(as_text(classes_from), listing_max_age_s)
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
                f"endpoint_url is {bare_url(endpoint_url)!r}, and no bucket is given: type data.bucket=..., or leave "
                "it out"
            )
        server, self.access.region = demo_server.acquire(), "us-east-1"
        self.access.endpoint_url, self.access.credentials = server.endpoint_url, server.credentials
        self._owns_server = True
        self._embedded_on = socket.gethostname()
        return self.access.bucket(demo_server.BUCKET)

    def _label(self, classes_from: str | None, max_age_s: float) -> None:
        if not self.labelled:
            self.classes, self.targets = [], np.full(len(self._keys), -1, np.int32)
            return
        folders = [class_of(key, self.prefix) for key in self._keys]
        origin = self.prefix if classes_from is None else _clean(classes_from)
        found = set(folders)
        known = found if origin == self.prefix else self._classes_under(origin, found, max_age_s)
        if origin == self.prefix:
            self._check_classes(known)
        self.classes = sorted(known)
        # macOS writes ü as u and two dots, other systems as one character: both are one name.
        number_of = {unicodedata.normalize("NFC", name): index for name, index in self.class_to_idx.items()}
        number_of |= self.class_to_idx
        numbers = {name: number_of.get(name, number_of.get(unicodedata.normalize("NFC", name), -1)) for name in found}
        if unknown := sorted(name for name, number in numbers.items() if number < 0):
            raise ValueError(
                f"{self.where()} has classes that {classes_from!r} does not have: "
                f"{', '.join(unknown[:10])}. It has: {', '.join(self.classes[:10])}"
                f"{', ...' if len(self.classes) > 10 else ''}; check data.train_prefix=... and data.val_prefix=..."
            )
        self.targets = np.fromiter((numbers[folder] for folder in folders), np.int32, len(folders))

    def _classes_under(self, origin: str, found: set[str], max_age_s: float) -> set[str]:
        # Mostly, both have the same folders: that is quickly seen, and a second listing may take long.
        if found == {name for name in self._store.folders(origin) if not is_leftover(name)}:
            folders = [f"{origin}/{name}".lstrip("/") for name in found]
            # A folder without images is no class; a bucket has none that is empty, and each look is a request.
            if not isinstance(self._store, LocalFolder) or all(holds_images(self._store, one) for one in folders):
                return found
        return {class_of(key, origin) for key in list_images_once(self._store, origin, max_age_s).keys}

    def _check_classes(self, classes: set[str]) -> None:
        if len(classes) == 1:
            inside = f"{self.prefix}/{(only := next(iter(classes)))}".lstrip("/")
            below = {class_of(key, inside) for key in self._keys}
            if "" not in below and len(below) > 1:
                raise ValueError(
                    f"the only folder in {self.where()} is {only}, which holds the folders "
                    f"{', '.join(sorted(below)[:10])}: for these as classes, type data.train_prefix={inside}, and "
                    "data.val_prefix=... likewise"
                )
        if isinstance(self._store, LocalFolder):  # a bucket has no empty folders
            folders = {name for name in self._store.folders(self.prefix) if not is_leftover(name)}
            if empty := sorted(folders - classes):
                _LOG.warning("%s has folders without images, which are no classes: %s", self.where(), ", ".join(empty))

    def _keep(self, wanted: list[bool]) -> None:
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
                f"{where.rstrip('/')}/<class>/<file>.jpg or the like: unpack archives, and check {setting}"
            )
        parent = self.prefix
        folders: list[str] = []
        while parent and not folders:
            parent = parent.rpartition("/")[0]
            folders = self._store.folders(parent)
        there = f"{self._store.public_url()}/{parent}"
        if not folders:
            return f"there is nothing under {where}, nor a folder in {there}: check data.bucket and {setting}"
        names = ", ".join(folders[:10]) + (f" and {len(folders) - 10} more" if len(folders) > 10 else "")
        return f"there is nothing under {where}; the folders in {there} are: {names}. Check {setting}"

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Return (key, class number) of each sample, as torchvision's ImageFolder does."""
        return list(zip(self._keys, self.targets.tolist(), strict=True))

    def where(self) -> str:
        return f"{self._store.public_url()}/{self.prefix}"

    def name(self, index: int) -> str:
        return self._keys[index]

    def n_bytes(self, index: int) -> int:
        return int(self._sizes[index])

    def fetch(self, index: int) -> Any:
        try:
            return self._store.get(self._keys[index], self.n_bytes(index))
        except ConnectionError as error:
            if self._embedded_on not in (None, socket.gethostname()):
                raise ConnectionError(
                    f"the embedded S3 server runs on {self._embedded_on} alone: give data.bucket=..."
                ) from None
            raise error from None

    def close(self) -> None:
        super().close()
        if self._owns_server:
            self._owns_server = False
            demo_server.release()


def _clean(prefix: str | None) -> str:
    return "/".join(part for part in (prefix or "").split("/") if part not in ("", "."))


def _other_meaning(bucket: str | None) -> str:
    # Return what to type where a bucket was meant to be a folder, or the other way round; "" if neither may be.
    if bucket is None or "://" in bucket:
        return ""
    if "/" not in bucket:
        return (
            f". For the folder {bucket} of this machine, type data.bucket=./{bucket}" if Path(bucket).is_dir() else ""
        )
    name, _, folder = bucket.partition("/")
    is_name = name.strip("~.") and folder
    return f". For a folder in the bucket {name}, type data.bucket={name} data.train_prefix={folder}" if is_name else ""
