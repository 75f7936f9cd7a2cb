"""Images in a bucket, one folder a class."""

from __future__ import annotations

import os
import random
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from data import digits_s3
from data.cache import Cache
from data.images import IMAGE_EXTENSIONS, decode
from data.s3 import Bucket

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_SMALL_IMAGE = 16 * 1024
"""Up to so many bytes an image is cached decoded: it saves the decoding, and costs little more memory."""


class S3ImageFolder(Dataset):
    """Labelled images of any S3-compatible store: the class is the folder directly above the file.

    The bucket is listed once, here. Images are fetched and decoded by threads of this process, a whole batch
    at a time in `__getitems__`, and stay uint8 until `prepare`. It can be pickled at any time, and opens its
    own connections in each process. Files that are no images by their extension are skipped. An image that
    can't be decoded is replaced by the next one that can, and noted in `bad`.

    Args:
        bucket: its name; None: an embedded S3 server on this machine, with scikit-learn's handwritten digits
            (32x32 pixels) under "train" and "val".
        prefix: the folder of the class folders, e.g. "imagenet/train"; "" for the whole bucket.
        classes_from: a prefix whose folders are the classes; None: those found under `prefix`. A validation
            set names the training set's prefix here, so that a missing folder shifts no label.
        endpoint_url: where the store is; None: what the environment says, else AWS.
        region: of the bucket; None: what the environment says.
        anon: read without credentials, as public buckets allow.
        transform: `(uint8 (3, height, width), random.Random) -> uint8 (3, height, width)`, see `transforms`;
            None: images as they are.
        threads: images fetched and decoded at a time.
        seed: of the transform's chance, together with the epoch and the sample's index.
        max_bad_fraction: share of the images that may be bad, 0..1.
        cache_mb: memory for fetched images, MiB per process; 0: none.
        mean: of each channel, 0..1, subtracted by `prepare`.
        std: of each channel, 0..1, divided by.

    Attributes:
        classes: names of the classes, sorted; `class_to_idx`: their numbers.
        skipped: how many objects under the prefix are no images.
        bad: {key: what is wrong} of the images that were replaced in this process.

    Raises:
        ValueError: an argument out of its range, or images of a class that `classes_from` does not have.
        FileNotFoundError: no such bucket, or no images under the prefix.
        PermissionError: no credentials, or wrong ones.
        ConnectionError: the store is not reachable.
        ModuleNotFoundError: the embedded server needs a package that is not installed.
    """

    built_once = True

    def __init__(
        self,
        bucket: str | None = None,
        prefix: str = "",
        *,
        classes_from: str | None = None,
        endpoint_url: str | None = None,
        region: str | None = None,
        anon: bool = False,
        transform: Callable[[Tensor, random.Random], Tensor] | None = None,
        threads: int = 16,
        seed: int = 0,
        max_bad_fraction: float = 0.01,
        cache_mb: float = 64,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}, and must be at least 1: type data.threads=16")
        if not 0 <= max_bad_fraction <= 1:
            raise ValueError(
                f"max_bad_fraction is {max_bad_fraction}, and is a share from 0 to 1: type data.max_bad_fraction=0.01"
            )
        self.prefix = prefix.strip("/")
        self.transform = transform
        self.threads = threads
        self.seed = seed
        self.max_bad_fraction = max_bad_fraction
        self.cache_mb = cache_mb
        self.mean, self.std = tuple(mean), tuple(std)
        self.skipped = 0
        self.bad: dict[str, str] = {}
        self._epoch = 0
        self._embedded_on: str | None = None
        self._reset()
        self._bucket = self._open(bucket, endpoint_url, region, anon)
        try:
            self._keys = self._list()
            self.classes = self._find_classes(classes_from)
            self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
            self._targets = self._label()
        except BaseException:
            self.close()
            raise

    def _reset(self) -> None:
        """Set what belongs to one process."""
        self._lock = threading.Lock()
        self._cache = Cache(int(self.cache_mb * 2**20))
        self._executor: ThreadPoolExecutor | None = None
        self._owns_server = False
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_lock", "_cache", "_executor", "_owns_server", "_constants", "_keys", "_targets")
        state = {name: value for name, value in self.__dict__.items() if name not in mine}
        # Sorted keys repeat each other: a million of them shrink to a few MB.
        return {**state, "_packed": zlib.compress("\n".join(self._keys).encode(), 1)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        keys = zlib.decompress(state.pop("_packed")).decode().split("\n")
        self.__dict__.update(state)
        self._reset()
        self._keys = keys
        self._targets = self._label()

    def _open(self, bucket: str | None, endpoint_url: str | None, region: str | None, anon: bool) -> Bucket:
        if bucket is not None:
            return Bucket(bucket, endpoint_url, region, anon)
        if endpoint_url is not None:
            raise ValueError(
                f"endpoint_url is {endpoint_url!r}, and no bucket is given: type data.bucket=..., or leave "
                "out data.endpoint_url to use the embedded digits"
            )
        endpoint = digits_s3.acquire()
        self._owns_server = True
        self._embedded_on = socket.gethostname()
        return Bucket(digits_s3.BUCKET, endpoint, "us-east-1", credentials=digits_s3.CREDENTIALS)

    def _list(self) -> list[str]:
        """Return the sorted keys of the images."""
        keys: list[str] = []
        others: Counter[str] = Counter()
        inside = len(self.prefix) + 1 if self.prefix else 0
        for key, size in self._bucket.objects(self.prefix):
            extension = os.path.splitext(key)[1].lower()  # noqa: PTH122 (half the time of listing, as a path)
            if extension in IMAGE_EXTENSIONS and "/" in key[inside:]:
                keys.append(key)
            elif size or extension:  # the rest are markers of folders
                others["images outside a class folder" if extension in IMAGE_EXTENSIONS else extension] += 1
        self.skipped = others.total()
        if not keys:
            raise FileNotFoundError(self._nothing_found(others))
        return sorted(keys)

    def _nothing_found(self, others: Counter[str]) -> str:
        where = f"s3://{self._bucket.name}/{self.prefix}"
        setting = "data.train_prefix=... or data.val_prefix=..."
        if others:
            kinds = ", ".join(f"{count} {kind or 'without extension'}" for kind, count in others.most_common(5))
            return (
                f"no images in class folders under {where}, only: {kinds}. Images are "
                f"{where}/<class>/<file>.jpg or {', '.join(sorted(IMAGE_EXTENSIONS - {'.jpg'}))}: check "
                f"{setting}"
            )
        parent = self.prefix
        folders: list[str] = []
        while parent and not folders:
            parent = parent.rpartition("/")[0]
            folders = self._bucket.folders(parent)
        there = f"s3://{self._bucket.name}/{parent}"
        if not folders:
            return f"there is nothing under {where}, nor a folder in {there}: check data.bucket and {setting}"
        names = ", ".join(folders[:10]) + (f" and {len(folders) - 10} more" if len(folders) > 10 else "")
        return f"there is nothing under {where}; the folders in {there} are: {names}. Check {setting}"

    def _find_classes(self, classes_from: str | None) -> list[str]:
        found = {_folder(key) for key in self._keys}
        if classes_from is None:
            return sorted(found)
        classes = self._bucket.folders(classes_from.strip("/"))
        unknown = sorted(found - set(classes))
        if unknown:
            raise ValueError(
                f"s3://{self._bucket.name}/{self.prefix} has classes that {classes_from!r} does not have: "
                f"{', '.join(unknown[:10])}; check data.train_prefix=... and data.val_prefix=..."
            )
        return classes

    def _label(self) -> list[int]:
        return [self.class_to_idx[_folder(key)] for key in self._keys]

    @property
    def samples(self) -> list[tuple[str, int]]:
        """(key, class number) of each sample, as torchvision's ImageFolder has it."""
        return list(zip(self._keys, self._targets, strict=True))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """Fetch, decode and transform a batch.

        Args:
            indices: of the samples.

        Returns:
            For each, the image as uint8 (3, height, width) and the number of its class.

        Raises:
            ValueError: too many images are bad.
            ConnectionError: the store is not reachable any more.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.threads, "s3-images", initializer=_compute_alone)
        epoch = self._epoch
        return list(self._executor.map(lambda index: self._sample(index, epoch), indices))

    def _sample(self, index: int, epoch: int) -> tuple[Tensor, int]:
        index = range(len(self))[index]
        image, found = self._image_or_neighbour(index)
        if self.transform is not None:
            image = self.transform(image, random.Random(f"{self.seed}/{epoch}/{index}"))  # noqa: S311
        return image, self._targets[found]

    def _image_or_neighbour(self, index: int) -> tuple[Tensor, int]:
        """Return the image at `index`, or else the next good one, and where it was."""
        for step in range(len(self)):
            found = (index + step) % len(self)
            key = self._keys[found]
            if key in self.bad:
                continue
            try:
                return self._image(key), found
            except (ValueError, FileNotFoundError) as error:
                self._note_bad(key, error)
        raise ValueError(f"no image of s3://{self._bucket.name}/{self.prefix} can be decoded: {self._some_bad()}")

    def _image(self, key: str) -> Tensor:
        cached = self._cache.get(key)
        if isinstance(cached, Tensor):
            return cached
        data = cached if cached is not None else self._fetch(key)
        image = decode(data)
        if image.numel() <= _SMALL_IMAGE:
            self._cache.put(key, image, image.numel())
        else:
            self._cache.put(key, data, len(data))
        return image

    def _fetch(self, key: str) -> bytearray:
        try:
            return self._bucket.get(key)
        except ConnectionError as error:
            if self._embedded_on not in (None, socket.gethostname()):
                raise ConnectionError(
                    f"the embedded S3 server runs on {self._embedded_on}, and {socket.gethostname()} can't "
                    "reach it: give a bucket that all hosts can read, data.bucket=..."
                ) from None
            raise error from None

    def _note_bad(self, key: str, error: Exception) -> None:
        with self._lock:
            self.bad[key] = str(error)
            too_many = len(self.bad) > self.max_bad_fraction * len(self)
        if too_many:
            raise ValueError(
                f"{len(self.bad)} of {len(self)} images of s3://{self._bucket.name}/{self.prefix} are bad, "
                f"and data.max_bad_fraction={self.max_bad_fraction:g} allows "
                f"{int(self.max_bad_fraction * len(self))}: {self._some_bad()}. Remove them, or type a "
                "larger data.max_bad_fraction=..."
            ) from None

    def _some_bad(self) -> str:
        with self._lock:
            bad = sorted(self.bad.items())
        return "; ".join(f"{key} ({reason})" for key, reason in bad[:3]) + ("; ..." if len(bad) > 3 else "")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the transform's chance belongs to; batches under way keep theirs."""
        self._epoch = epoch

    def prepare(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Normalise a collated batch, on the device it is on.

        Args:
            batch: images uint8 (batch, 3, height, width), in any memory format, and classes (batch,).

        Returns:
            Images float32 of the same shape and memory format, and the classes.
        """
        images, targets = batch
        if images.device not in self._constants:
            shape = (1, 3, 1, 1)
            mean = torch.tensor(self.mean, device=images.device).view(shape) * 255
            scale = 1 / (torch.tensor(self.std, device=images.device).view(shape) * 255)
            self._constants[images.device] = mean, scale
        mean, scale = self._constants[images.device]
        return images.float().sub_(mean).mul_(scale), targets

    def close(self) -> None:
        """Stop the threads, and the embedded server where this is its last user."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None
        if self._owns_server:
            self._owns_server = False
            digits_s3.release()


def _compute_alone() -> None:
    """Keep each of the many threads from computing with a team of its own: they would fight for the cores."""
    torch.set_num_threads(1)  # of the calling thread; those that compute already keep theirs


def _folder(key: str) -> str:
    return key.rsplit("/", 2)[-2]
