"""Labelled images from anywhere: read, decoded and transformed by threads of this process."""

from __future__ import annotations

import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ddp_hydra.data.images.bad_samples import MOST_IN_A_ROW, BadSamples, TooManyBadSamplesError
from ddp_hydra.data.images.batch_loader import BatchLoader
from ddp_hydra.data.images.cache import Cache
from ddp_hydra.data.images.decode import decode, read_jpeg_header
from ddp_hydra.storage import Traffic
from ddp_hydra.storage.base import StaleCredentialsError
from ddp_hydra.storage.counters import TransferCounters

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_SMALL_IMAGE = 16 * 1024
"""Up to so many bytes an image is cached decoded: it saves the decoding, and costs little more memory."""


class PreallocatedBatch(list):
    """Samples whose images are the rows of one tensor, so that there is nothing left to collate.

    Args:
        samples: (image, class) of each.
        images: uint8 (batch, 3, height, width), channels last in memory.
    """

    def __init__(self, samples: list[tuple[Tensor, int]], images: Tensor) -> None:
        super().__init__(samples)
        self.images = images


class ImageDataset(Dataset, ABC):
    """Labelled images; a subclass knows where they are.

    A whole batch is read at a time in `__getitems__`: many threads wait for the store, as many as there are cores
    decode. Images stay uint8 until `prepare`. It can be pickled at any time, and opens its own connections in each
    process. An image that can't be read or decoded is replaced by the next one that can, and noted in `bad`.

    Args:
        transform: `(uint8 (3, height, width), random.Random) -> uint8 (3, height, width)`, see `transforms`;
            None: images as they are.
        threads: images fetched at a time.
        decoders: images decoded at a time; None: the cores of this machine, shared by the ranks on it.
        memory_mb: MiB of files that are fetched and not yet decoded, per process.
        cache_mb: memory for fetched images, MiB per process; 0: none.
        seed: of the transform's chance, together with the epoch and the sample's index.
        max_bad_fraction: share of the images that may be bad, 0..1.
        mean: of each channel, 0..1, subtracted by `prepare`.
        std: of each channel, 0..1, divided by.

    Attributes:
        targets: class number of each sample.
        classes: names of the classes; `class_to_idx`: their numbers.

    Raises:
        ValueError: an argument out of its range.
    """

    built_once = True
    targets: np.ndarray
    classes: list[str]

    def __init__(
        self,
        *,
        transform: Callable[[Tensor, random.Random], Tensor] | None = None,
        threads: int = 32,
        decoders: int | None = None,
        memory_mb: float = 256,
        cache_mb: float = 64,
        seed: int = 0,
        max_bad_fraction: float = 0.01,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        for name, value in {"threads": threads, "decoders": decoders}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, and must be at least 1: type data.{name}=16")
        if not 0 <= max_bad_fraction <= 1:
            raise ValueError(
                f"max_bad_fraction is {max_bad_fraction}, and is a share from 0 to 1: type data.max_bad_fraction=0.01"
            )
        self.transform = transform
        self.threads = threads
        self.decoders = decoders
        self.memory_mb = memory_mb
        self.cache_mb = cache_mb
        self.seed = seed
        self.max_bad_fraction = max_bad_fraction
        self.mean, self.std = tuple(mean), tuple(std)
        self.traffic = Traffic()
        self._epoch = 0
        self._bad: BadSamples | None = None
        self._reset()

    def _reset(self) -> None:
        """Set what belongs to one process."""
        self._cache = Cache(int(self.cache_mb * 2**20))
        self._maker: BatchLoader | None = None
        self._works = False
        self._lock = threading.Lock()
        self._tally = TransferCounters()
        self._normalise: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_works", "_cache", "_maker", "_lock", "_tally", "_normalise")
        return {name: value for name, value in self.__dict__.items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @abstractmethod
    def fetch(self, index: int) -> Any:
        """Return the file of a sample, with the buffer protocol.

        Raises:
            FileNotFoundError: it is not there.
            PermissionError: it may not be read.
            ConnectionError: the store is not reachable.
            ValueError: it is damaged.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a sample, for messages."""

    @abstractmethod
    def where(self) -> str:
        """Return the name of the data set, for messages."""

    def n_bytes(self, index: int) -> int:
        """Return the size of a sample's file, as far as it is known."""
        return 0

    def target(self, index: int) -> int:
        """Return the class number of a sample."""
        return int(self.targets[index])

    @property
    def bad(self) -> dict[str, str]:
        """{name: what is wrong} of the images that were replaced in this process."""
        return self._noted().reasons

    @property
    def bad_counts(self) -> dict[str, int]:
        """{name: how many images it stands for} of the `bad` that are whole shards."""
        return self._noted().counts

    def _noted(self) -> BadSamples:
        if self._bad is None:
            self._bad = BadSamples(len(self), self.max_bad_fraction, self.where())
        return self._bad

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Fetch, decode and transform a batch.

        Args:
            indices: of the samples.

        Returns:
            For each, the image as uint8 (3, height, width) and the number of its class.

        Raises:
            IndexError: there is no such sample.
            ValueError: too many images are bad.
            PermissionError: the store does not take the credentials any more.
            ConnectionError: the store is not reachable any more.
        """
        indices = [range(len(self))[index] for index in indices]
        self.count(samples=len(indices))
        self._noted()
        size = getattr(self.transform, "size", None) if hasattr(self.transform, "of_jpeg") else None  # else any size
        batch = self._open_maker().make(indices, self._epoch, size)
        samples = batch.wait()
        return samples if batch.images is None else PreallocatedBatch(samples, batch.images)

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Make a batch of what `__getitems__` returned, without another copy where it can."""
        if isinstance(samples, PreallocatedBatch):
            return samples.images, torch.tensor([target for _, target in samples])
        return default_collate(samples)

    # -- what a BatchLoader needs ---------------------------------------------------------------------------

    def good_from(self, index: int) -> int:
        """Return a sample's index, or that of the next one that is not known to be bad.

        Raises:
            ValueError: all are.
        """
        bad = self._noted()
        while (behind := bad.behind(index)) is not None:
            if bad.count >= len(self):
                raise TooManyBadSamplesError(f"no image of {self.where()} can be decoded: {bad.some()}")
            index = behind
        return index

    def note_bad(self, index: int, error: Exception, in_a_row: int) -> None:
        """Note that a sample can't be read.

        Args:
            index: of the sample.
            error: why.
            in_a_row: how many side by side were bad with it.

        Raises:
            ValueError: there are too many now.
            Exception: `error` itself, where it is not the sample's.
        """
        if not isinstance(error, (ValueError, FileNotFoundError, PermissionError)):
            raise error
        if isinstance(error, StaleCredentialsError) or (isinstance(error, PermissionError) and not self._works):
            raise error  # nothing can be read, or not any more
        bad = self._noted()
        if bad.count >= len(self):
            raise error
        bad.add(index, self.name(index), error)
        if in_a_row >= MOST_IN_A_ROW:
            raise TooManyBadSamplesError(f"{in_a_row} images in a row of {self.where()} can't be read: {bad.some()}")

    def kept(self, index: int) -> Any:
        """Return what memory has of a sample: its image, its file, or None."""
        return self._cache.get(index)

    def image_of(self, index: int, data: Any, rng: random.Random) -> Tensor:
        """Make an image, and keep it or its file while there is room.

        Args:
            index: of the sample.
            data: its file, or its image as it was kept.
            rng: of the sample.
        """
        self._works = True
        if isinstance(data, Tensor):
            return self._transformed(data, rng)
        header = read_jpeg_header(data)
        of_jpeg = getattr(self.transform, "of_jpeg", None)
        if header is None or of_jpeg is None or header.height * header.width * 3 <= _SMALL_IMAGE:
            image = decode(data)
            if image.numel() <= _SMALL_IMAGE:
                self._cache.put(index, image, image.numel())
            else:
                self._cache.put(index, data, len(data))
            return self._transformed(image, rng)
        image = of_jpeg(data, header, rng)
        self._cache.put(index, data, len(data))
        return image

    def _transformed(self, image: Tensor, rng: random.Random) -> Tensor:
        return image if self.transform is None else self.transform(image, rng)

    def count(self, **more: float) -> None:
        """Count what reading costs."""
        self._tally.add(**more)

    # -- for the loop --------------------------------------------------------------------------------------

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
        width = images.shape[-1]
        rows = images.permute(0, 2, 3, 1)
        if not rows.is_contiguous():
            mean, scale = self._constants(images.device, 1)
            return images.float().sub_(mean.view(1, 3, 1, 1)).mul_(scale.view(1, 3, 1, 1)), targets
        # Whole rows of pixels at a time: vectors of three would be slow on a CPU.
        mean, scale = self._constants(images.device, width)
        rows = rows.reshape(-1, width * 3).float().sub_(mean).mul_(scale)
        return rows.view(-1, images.shape[2], width, 3).permute(0, 3, 1, 2), targets

    def _constants(self, device: torch.device, width: int) -> tuple[Tensor, Tensor]:
        """Return mean and 1/std of the bytes of a row of pixels, (3 * width,)."""
        if (device, width) not in self._normalise:
            mean = torch.tensor(self.mean, device=device) * 255
            scale = 1 / (torch.tensor(self.std, device=device) * 255)
            self._normalise[device, width] = mean.repeat(width), scale.repeat(width)
        return self._normalise[device, width]

    def stats(self) -> dict[str, float]:
        """Return what reading cost in this process so far.

        Returns:
            samples: images made; bytes: read from the store; requests; retries; cache_hits and cache_misses;
            bad_samples; fetch_s and decode_s: over all threads.
        """
        counts = {name: self._tally.total(name) for name in ("samples", "cache_misses", "fetch_s", "decode_s")}
        traffic = {name: getattr(self.traffic, name) for name in ("requests", "retries", "bytes")}
        return counts | traffic | {"cache_hits": self._cache.hits, "bad_samples": self._noted().count}

    def close(self) -> None:
        """Stop the threads."""
        if self._maker is not None:
            self._maker.close()
            self._maker = None

    def _open_maker(self) -> BatchLoader:
        with self._lock:
            if self._maker is None or self._maker.pid != os.getpid():  # a fork copies no threads
                decoders = self.decoders or _cores_for_one()
                self._maker = BatchLoader(self, self.threads, decoders, int(self.memory_mb * 2**20))
            return self._maker


def _cores_for_one() -> int:
    """Return the cores of this machine for each of the ranks on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
