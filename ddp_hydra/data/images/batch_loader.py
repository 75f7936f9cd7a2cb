"""Batches of images, made by threads: many wait for the store, few decode."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_hydra.data.images.memory_budget import MemoryBudget


class ImageSource(Protocol):
    """What a `BatchLoader` needs of a set of images.

    Args:
        seed: of the random changes.
    """

    seed: int

    def good_from(self, index: int) -> int:
        """Return the first index from this one on that is not known to be bad."""

    def kept(self, index: int) -> Any:
        """Return what the memory holds of a sample, or None."""

    def n_bytes(self, index: int) -> int:
        """Return the size of a sample's file, bytes."""

    def fetch(self, index: int) -> Any:
        """Read a sample's file."""

    def image_of(self, index: int, data: Any, rng: random.Random) -> Tensor:
        """Decode and transform a file."""

    def target(self, index: int) -> int:
        """Return a sample's class."""

    def note_bad(self, index: int, error: Exception, tried: int) -> None:
        """Count a sample that can't be read; raises where it is no matter of the sample."""

    def count(self, **costs: float) -> None:
        """Add to what reading cost."""


class Batch:
    """The samples of a batch, as they come in.

    Args:
        size: how many they are.
        images: rows to fill, (size, 3, height, width); None: each image is as large as it is.

    Attributes:
        error: why there will be no such batch, or None.
    """

    def __init__(self, size: int, images: Tensor | None) -> None:
        self.images = images
        self.samples: list[Any] = [None] * size
        self.error: BaseException | None = None
        self._counter = itertools.count(1)  # counts without a lock
        self._complete = threading.Event()

    def put(self, place: int, image: Tensor, target: int) -> None:
        """Take a sample in."""
        self.samples[place] = (image if self.images is None else self.images[place].copy_(image)), target
        self._count()

    def fail(self, error: BaseException) -> None:
        """Take in that a sample can't be had; the first reason counts."""
        self.error = self.error or error
        self._count()

    def _count(self) -> None:
        if next(self._counter) == len(self.samples):
            self._complete.set()

    def wait(self) -> list[Any]:
        """Return the samples when all are there; raises what went wrong."""
        if self.samples:
            self._complete.wait()
        if self.error is not None:
            raise self.error
        return self.samples


@dataclass
class _Wanted:
    """A sample on its way.

    Args:
        batch: it belongs to.
        place: in it.
        index: of the sample that is tried: the one asked for, or what replaces it.
        rng: seed of its chance.
        tried: how many before it were found bad.
    """

    batch: Batch
    place: int
    index: int
    rng: str
    tried: int = 0


class BatchLoader:
    """Fetches and decodes the images of an `ImageDataset`.

    Nobody waits for another thread: who has fetched a file hands it on and fetches the next, and the few that decode
    find their memory in the caches of the cores.

    Args:
        images: what to make batches of.
        threads: files fetched at a time.
        decoders: files decoded at a time.
        memory: bytes of files that are fetched and not yet decoded.

    Attributes:
        pid: of the process that its threads live in.
    """

    def __init__(self, images: ImageSource, threads: int, decoders: int, memory: int) -> None:
        self.pid = os.getpid()
        self._images = images
        self._room = MemoryBudget(memory)
        self._fetching = ThreadPoolExecutor(threads, "images")
        self._decoding = ThreadPoolExecutor(decoders, "images-decode", initializer=_compute_alone)
        self._closing = False

    def make(self, indices: Sequence[int], epoch: int, size: int | None) -> Batch:
        """Begin a batch.

        Args:
            indices: of its samples, 0 to below the length.
            epoch: that its chance belongs to.
            size: side of the images, pixels; None: as they are.
        """
        images = None
        if size is not None:
            images = torch.empty(len(indices), size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        batch = Batch(len(indices), images)
        for place, index in enumerate(indices):
            wanted = _Wanted(batch, place, index, f"{self._images.seed}/{epoch}/{index}")
            self._fetching.submit(self._fetch, wanted)
        return batch

    def _fetch(self, wanted: _Wanted) -> None:
        n_bytes = 0
        try:
            if self._closing or wanted.batch.error:
                raise RuntimeError("the data set was closed while it made a batch")
            wanted.index = self._images.good_from(wanted.index)
            data = self._images.kept(wanted.index)
            if data is None:
                n_bytes = self._images.n_bytes(wanted.index)
                self._room.take(n_bytes)
                begin = time.perf_counter()
                data = self._images.fetch(wanted.index)
                self._images.count(cache_misses=1, fetch_s=time.perf_counter() - begin)
            self._decoding.submit(self._decode, wanted, data, n_bytes)
        except Exception as error:
            self._room.give(n_bytes)
            self._replace(wanted, error)

    def _decode(self, wanted: _Wanted, data: Any, n_bytes: int) -> None:
        begin = time.perf_counter()
        try:
            image = self._images.image_of(wanted.index, data, random.Random(wanted.rng))  # noqa: S311
            wanted.batch.put(wanted.place, image, self._images.target(wanted.index))
        except Exception as error:
            self._replace(wanted, error)
        finally:
            self._room.give(n_bytes)
        self._images.count(decode_s=time.perf_counter() - begin)

    def _replace(self, wanted: _Wanted, error: Exception) -> None:
        """Try the next sample in place of a bad one; other errors are the batch's."""
        try:
            wanted.tried += 1
            self._images.note_bad(wanted.index, error, wanted.tried)
            self._fetching.submit(self._fetch, wanted)
        except Exception as final:
            wanted.batch.fail(final)

    def close(self) -> None:
        """Stop the threads; batches on their way fail."""
        self._closing = True
        self._fetching.shutdown()
        self._decoding.shutdown()


def _compute_alone() -> None:
    """Keep each of the threads from computing with a team of its own: they would fight for the cores."""
    torch.set_num_threads(1)  # of the calling thread; those that compute already keep theirs
