"""A data set of labelled images, which threads of this process read, decode and transform."""

from __future__ import annotations

import inspect
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_hydra.data.batch import mapped, stacked
from ddp_hydra.data.draws import Indices, StateGuard, placed
from ddp_hydra.data.images.batch_loader import (
    MOST_IN_A_ROW,
    BadSamples,
    BatchLoader,
    Cache,
    PreallocatedBatch,
    TooManyBadSamplesError,
    examples,
    is_of_sample,
)
from ddp_hydra.data.images.decode import adapted, decode, normalise, read_jpeg_header
from ddp_hydra.data.names import check_range
from ddp_hydra.data.threads import cores_per_rank, is_thread_safe
from ddp_hydra.storage import Access, TransferCounters
from ddp_hydra.storage.base import Counters, ProcessLocal

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_ACCESS = frozenset(inspect.signature(Access).parameters) - {"setting", "traffic", "credentials", "_stores"}
_MAKE_TENSORS = "let its transforms return tensors of one shape, as by ToTensor()"
_COUNTS = ("samples", "cache_hits", "cache_misses")
_SMALL_IMAGE = 16 * 1024
"""Largest image, in bytes, that is cached decoded: that saves the decoding, and takes little more memory."""


@dataclass(kw_only=True, eq=False, repr=False)
class ImageDataset(ProcessLocal, Dataset, ABC):
    """Labelled images; a subclass reads their files.

    `__getitems__` reads a whole batch at a time: many threads wait for the store, and as many threads as there are
    cores decode. Images stay uint8 until `prepare`. The data set can be pickled at any time, and opens its own
    connections in each process. An image that can't be read or decoded is noted in `bad` and replaced by the next good
    one.

    Args:
        transform: `(uint8 (3, height, width), random.Random) -> uint8 (3, height, width)`, see `transforms`; or
            takes a PIL image, as torchvision's do, see `PilTransform`: slower; None: images as they are.
        target_transform: takes a class number and returns the target of the sample; None: the number itself.
        threads: how many images are fetched at a time.
        decoders: how many images are decoded at a time; None: the cores of this machine, divided among its ranks.
        memory_mb: the most MiB of files that are fetched and not yet decoded, per process.
        cache_mb: MiB of memory that keeps fetched images, per process; 0: none are kept.
        seed: of the random transforms, together with the epoch and the sample's index.
        max_bad_fraction: share of the images that may be bad, 0..1.
        mean: (3,), 0..1, subtracted from each channel by `prepare`.
        std: (3,), 0..1, by which `prepare` divides each channel.

    Attributes:
        labelled: False if the classes are not known; then all targets are -1.
        targets: (samples,), the class numbers.
        classes: the names of the classes; `class_to_idx`: {name: number}.

    Raises:
        ValueError: an argument is out of its range.
    """

    transform: Callable[..., Any] | None = None
    target_transform: Callable[[int], Any] | None = None
    threads: int = 64
    decoders: int | None = None
    memory_mb: float = 256
    cache_mb: float = 64
    seed: int = 0
    max_bad_fraction: float = 0.01
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    targets: np.ndarray = field(init=False)
    classes: list[str] = field(init=False)
    built_once = True
    thread_safe = True
    labelled = True

    def __post_init__(self) -> None:
        check_range("threads", self.threads, 1, example=16)
        if self.decoders is not None:
            check_range("decoders", self.decoders, 1, example=16)
        check_range("max_bad_fraction", self.max_bad_fraction, 0, 1, example=0.01)
        self.transform = adapted(self.transform)
        self.mean, self.std = tuple(self.mean), tuple(self.std)
        self.traffic = TransferCounters()
        self._epoch = 0
        self._bad = BadSamples(self)
        self._begin_process_state()

    def _set_process_state(self) -> None:
        self._cache = Cache(int(self.cache_mb * 2**20))
        self._loader: BatchLoader | None = None
        self._works = False
        self._lock = threading.Lock()
        self._counters = Counters()
        self.count = self._counters.add

    def _begin_fork(self) -> None:
        super()._begin_fork()
        self._loader = None  # a fork does not copy threads

    @abstractmethod
    def fetch(self, index: int) -> Any:
        """Return the file of a sample, with the buffer protocol; ValueError: it is damaged."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a sample, for messages."""

    @abstractmethod
    def where(self) -> str:
        """Return the name of the data set, for messages."""

    def advice_on_missing(self) -> str:
        """Return what to check where a file is missing, for messages; "" for nothing."""
        return ""

    def n_bytes(self, index: int) -> int:
        """Return the size of a sample's file, bytes; 0 if it is not known."""
        return 0

    def target(self, index: int) -> int:
        return int(self.targets[index])

    def sample_id(self, index: int) -> str:
        """Return what identifies a sample that was read, for predictions: its name."""
        return self.name(index)

    def error_of(self, index: int) -> str:
        """Return why a sample that was read is replaced by another; "" if it is not."""
        return self.bad[self._bad.names[index]] if index in self._bad.next else ""

    @property
    def bad(self) -> dict[str, str]:
        """Return {name: what is wrong} of the images that were replaced in this process."""
        return self._bad.reasons

    @property
    def bad_counts(self) -> dict[str, int]:
        return self._bad.counts

    @cached_property
    def class_to_idx(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return the image, uint8 (3, height, width), and the class number of each, or what transforms make of them."""
        self.count(samples=len(indices))
        if not self.transforms_in_threads:
            return self._transformed_here(indices)
        says_size = hasattr(self.transform, "of_jpeg")  # only the built-in transforms do, in advance
        return self._load(indices, getattr(self.transform, "size", None) if says_size else None)

    def _load(self, indices: Sequence[int], size: int | None = None) -> list[Any]:
        return self._get_loader().load([range(len(self))[index] for index in indices], self._epoch, size)

    @property
    def transforms_in_threads(self) -> bool:
        return all(one is None or is_thread_safe(one) for one in (self.transform, self.target_transform))

    def _transformed_here(self, wanted: Sequence[int]) -> list[tuple[Any, Any]]:
        indices = wanted if isinstance(wanted, Indices) else placed(Indices(wanted, self._epoch), self.seed)
        samples = self._load(indices)
        with nullcontext() if indices is wanted else StateGuard():
            return [self._transformed_sample(indices, place, sample) for place, sample in enumerate(samples)]

    def _transformed_sample(self, indices: Indices, place: int, sample: Any) -> tuple[Any, Any]:
        index, in_a_row = range(len(self))[indices[place]], 0
        while True:
            (image, rng), target = sample
            indices.seed_sample(place)
            try:
                target = target if self.target_transform is None else self.target_transform(target)
                return self._transformed(image, rng), target
            except Exception as error:
                in_a_row += 1
                self.note_bad(self.good_from(index), error, in_a_row)
            (sample,) = self._load([index])

    def collate(self, samples: list[tuple[Any, Any]]) -> Any:
        """Make a batch of the samples that `__getitems__` returned, without a copy if possible."""
        if isinstance(samples, PreallocatedBatch):
            return samples.images, stacked(self, [target for _, target in samples], _MAKE_TENSORS)
        return stacked(self, samples, _MAKE_TENSORS)

    # For the BatchLoader

    def good_from(self, index: int) -> int:
        bad = self._bad
        while index in bad.next:
            if bad.count >= len(self):
                raise TooManyBadSamplesError(f"no image of {self.where()} can be decoded: {examples(bad.reasons)}")
            index = bad.next[index]
        return index

    def note_bad(self, index: int, error: Exception, in_a_row: int) -> None:
        # in_a_row: number of neighbours in a row that are bad, this one included.
        # Raises `error` itself, if it is not the sample's own.
        if not is_of_sample(error, self._works):
            raise error
        self._bad.add(index, error)
        if in_a_row >= MOST_IN_A_ROW:
            some = examples(self._bad.reasons)
            raise TooManyBadSamplesError(f"{in_a_row} images in a row of {self.where()} can't be read: {some}")

    def cached(self, index: int) -> Any:
        found = self._cache.get(index)
        self.count(cache_hits=found is not None)
        return found

    def sample_target(self, target: int) -> Any:
        return target if self.target_transform is None else self.target_transform(target)

    def make_image(self, index: int, data: Any, rng: random.Random) -> Any:
        # data: its file, or its image from memory. One of them is kept in memory while that has space.
        of_jpeg: Any = getattr(self.transform, "of_jpeg", None)
        header = None if of_jpeg is None or isinstance(data, Tensor) else read_jpeg_header(data)
        if header is None or header.height * header.width * 3 <= _SMALL_IMAGE:
            return self._transformed(self.decoded(index, data), rng)
        self._works = True
        image = of_jpeg(data, header, rng)
        self._cache.put(index, data, len(data))
        return image

    def decoded(self, index: int, data: Any) -> Tensor:
        self._works = True
        if isinstance(data, Tensor):
            return data
        image = decode(data)
        if image.numel() <= _SMALL_IMAGE:
            self._cache.put(index, image, image.numel())
        else:
            self._cache.put(index, data, len(data))
        return image

    def _transformed(self, image: Tensor, rng: random.Random) -> Any:
        return image if self.transform is None else self.transform(image, rng)

    # For the training loop

    def share(self, processes: int) -> None:
        """Take an equal part of threads and memory: so many processes make batches of this data set for one rank."""
        self.threads = -(-self.threads // processes)
        spare = processes if processes > 1 else 0  # a core of each process for what it does besides decoding
        self.decoders = max(1, (self.decoders or cores_per_rank() - spare) // processes)
        self.memory_mb /= processes
        self.cache_mb /= processes
        self._set_process_state()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the random transforms; batches that are being made keep theirs."""
        self._epoch = epoch

    def prepare(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Normalise a collated batch on its device; images stay in their memory format.

        A transform may have made several images of each, in a tuple, a list or a dict, or floats, which stay as they
        are.
        """
        images, targets = batch
        if isinstance(images, Tensor) and images.dtype == torch.uint8 and images.ndim == 4:
            return normalise(images, self.mean, self.std), targets  # with all strides, also of a single image
        return mapped(self._normalised, images), targets

    def _normalised(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8 or images.ndim < 4 or images.shape[-3] != 3:  # a mask, a number
            return images
        return normalise(images.flatten(0, -4), self.mean, self.std).reshape(images.shape)

    @cached_property
    def scaling(self) -> str:
        """Says what pixels a model is given; "" if the transform doesn't tell. Training and validation must agree."""
        if self.transform is None or type(self.transform).__module__.startswith("ddp_hydra.data.transforms"):
            dtype: Any = torch.uint8
        else:
            try:
                with StateGuard():
                    blank = torch.zeros(3, 256, 256, dtype=torch.uint8)
                    dtype = getattr(self.transform(blank, random.Random(0)), "dtype", None)  # noqa: S311
            except Exception:  # it needs another image: the first batch tells
                return ""
        if dtype == torch.uint8:
            mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
            return f"bytes, normalised by mean ({mean}) and std ({std})"
        return f"{str(dtype).removeprefix('torch.')}, as their transform makes them" if dtype is not None else ""

    def stats(self) -> dict[str, float]:
        """Return what reading has cost this process so far; fetch_s and decode_s: seconds, over all threads."""
        counts = {name: self._counters.totals[name] for name in (*_COUNTS, "fetch_s", "decode_s")}
        traffic = {name: getattr(self.traffic, name) for name in ("requests", "retries", "bytes")}
        return counts | traffic | {"bad_samples": self._bad.count}

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _get_loader(self) -> BatchLoader:
        with self._lock:
            if self._loader is None:
                decoders = self.decoders or cores_per_rank()
                self._loader = BatchLoader(self, self.threads, decoders, int(self.memory_mb * 2**20))
            return self._loader


class StoredImages(ImageDataset):
    """Labelled images that are read from stores; a subclass knows their keys.

    Args:
        endpoint_url: of s3:// URLs; None: what the environment says, else AWS.
        region: of s3:// URLs; None: what the environment says.
        anon: read s3:// URLs without credentials, as public buckets allow.
        addressing: of s3:// URLs, "path" or "virtual", see `storage.Bucket`.
        client: what reads s3:// URLs, "obstore" or, where that lacks something, "s3fs".
        storage_options: arguments of fsspec's file system, for s3fs and for URLs that only fsspec knows.
        timeout_s: how long a connection may be silent.
        retry_timeout_s: how long a failing read is tried again.
        options: arguments of `ImageDataset`, too: transform, threads, cache_mb, max_bad_fraction and more.

    Attributes:
        access: how URLs are read.

    Raises:
        ValueError: an argument is out of its range.
        ModuleNotFoundError: s3fs is not installed.
    """

    setting: ClassVar[str] = "data.bucket"
    """The config key that holds the URL, for messages."""

    def __init__(self, **options: Any) -> None:
        own = {name: options.pop(name) for name in _ACCESS & options.keys()}
        super().__init__(**options)
        self.access = Access(setting=self.setting, traffic=self.traffic, **own)

    def close(self) -> None:
        self.access.close()
        super().close()
