"""Makes batches of images in threads: many threads wait for the store, few decode; counts images that are bad."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_hydra.storage.base import ProcessLocal, StaleCredentialsError

MOST_IN_A_ROW = 100
"""Number of bad samples in a row after which reading fails: the fault is not in single files."""


class LostSamples(ValueError):
    """All samples of a shard can't be read."""

    def __init__(self, message: str, name: str, first: int, count: int) -> None:
        super().__init__(message)
        self.name, self.first, self.count = name, first, count


class TooManyBadSamplesError(ValueError):
    """More samples are bad than the user allows."""

    mistake = True


_OF_A_FILE = (errno.EACCES, errno.EPERM, errno.ELOOP)
"""Errors of a file on a disk; those of a store have no number."""


def is_of_sample(error: Exception, works: bool) -> bool:
    # Return whether an error is that of one sample, not of a store that may not be read, or not any more.
    # works: another sample could be read.
    if isinstance(error, (StaleCredentialsError, TooManyBadSamplesError)):
        return False
    if isinstance(error, OSError) and error.errno in _OF_A_FILE:
        return True
    return isinstance(error, (ValueError, FileNotFoundError)) or (isinstance(error, PermissionError) and works)


def examples(reasons: dict[str, str]) -> str:
    names = sorted(reasons)
    return "; ".join(f"{name} ({reasons[name]})" for name in names[:3]) + ("; ..." if len(names) > 3 else "")


def too_many(
    count: int, n_samples: int, max_fraction: float, reasons: dict[str, str], where: str = "", advice: str = ""
) -> TooManyBadSamplesError:
    return TooManyBadSamplesError(
        f"{count} of {n_samples:,} samples{where} {'is' if count == 1 else 'are'} bad, and data.max_bad_fraction="
        f"{max_fraction:g} allows {int(max_fraction * n_samples)}: {examples(reasons)}. {advice}Remove them, or type a "
        "larger data.max_bad_fraction=..."
    )


class BadSamples(ProcessLocal):
    """The samples of an `ImageDataset` that were found bad in this process."""

    def __init__(self, images: Any) -> None:
        self.images = images
        self.reasons: dict[str, str] = {}  # {name: what is wrong}
        self.counts: dict[str, int] = {}  # {name of a shard: how many samples it has}
        self.names: dict[int, str] = {}  # {index of a bad sample: its name, or that of its lost shard}
        self.next: dict[int, int] = {}  # {index of a bad sample: the index that follows it, or its lost shard}
        self._begin_process_state()

    def _set_process_state(self) -> None:
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        return len(self.next)

    def add(self, index: int, error: Exception) -> None:
        n_samples, max_fraction = len(self.images), self.images.max_bad_fraction
        found = error if isinstance(error, LostSamples) else LostSamples("", self.images.name(index), index, 1)
        name, lost = found.name, range(found.first, found.first + found.count)
        with self._lock:
            if index in self.next:
                return  # another thread has noted it
            if found is error:
                self.counts[name] = found.count
            # They are read without the lock, so a bad sample's reason and count are there before it.
            self.reasons[name] = str(error)
            self.names.update(dict.fromkeys(lost, name))
            self.next.update(dict.fromkeys(lost, lost.stop % n_samples))
        if self.count > max_fraction * n_samples:
            advice = self.images.advice_on_missing() if isinstance(error, FileNotFoundError) else ""
            where = f" of {self.images.where()}"
            raise too_many(self.count, n_samples, max_fraction, self.reasons, where, advice) from None


class PreallocatedBatch(list):
    """Samples whose images are already the rows of one tensor, so that they need not be collated."""

    def __init__(self, samples: list[tuple[Any, Any]], images: Tensor) -> None:
        super().__init__(samples)
        self.images = images


class MemoryBudget:
    """Lets threads use a number of bytes together. A single request that is larger than all of it may be used alone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, n_bytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + n_bytes <= self._size)
            self._taken += n_bytes

    def give(self, n_bytes: int) -> None:
        with self._changed:
            self._taken -= n_bytes
            self._changed.notify_all()


@dataclass
class _Request:
    """A sample that is being loaded."""

    place: int  # in the batch
    index: int  # of the requested sample, or of one that replaces it
    rng: str  # seed of its random transforms
    row: Tensor | None  # where its image goes; None: into a tensor of its own
    target: Any = None  # as the data set has it
    tried: int = 0  # samples that were tried before it and found bad


class BatchLoader:
    """Fetches and decodes the images of an `ImageDataset`.

    A thread that has fetched a file passes it to the decoding threads and fetches the next one. Few threads decode, so
    their memory stays in the caches of the cores.
    """

    def __init__(self, images: Any, threads: int, decoders: int, memory: int) -> None:
        self._images = images
        self._memory = MemoryBudget(memory)
        self._fetching = ThreadPoolExecutor(threads, "images")
        # torch uses one thread in each decoding thread, for which alone this is set: more would compete for the cores.
        self._decoding = ThreadPoolExecutor(decoders, "images-decode", torch.set_num_threads, (1,))
        self._closing = False

    def load(self, indices: Sequence[int], epoch: int, size: int | None) -> list[Any]:
        # Bad samples are replaced by others.
        # size: side of the images, pixels; None: the images have different sizes.
        images = None
        if size is not None:
            images = torch.empty(len(indices), size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        requests = [
            _Request(place, index, f"{self._images.seed}/{epoch}/{index}", None if images is None else images[place])
            for place, index in enumerate(indices)
        ]
        samples: list[Any] = [None] * len(indices)
        pending = {self._begin(request): request for request in requests}
        try:
            while pending:
                for made in wait(pending, return_when=FIRST_EXCEPTION).done:
                    request = pending.pop(made)
                    try:
                        samples[request.place] = made.result()
                    except Exception as error:
                        request.tried += 1
                        self._images.note_bad(request.index, error, request.tried)
                        _forget_frames(error)
                        pending[self._begin(request)] = request
        finally:
            for made in pending:
                made.cancel()
        return samples if images is None else PreallocatedBatch(samples, images)

    def _begin(self, request: _Request) -> Future[Any]:
        made: Future[Any] = Future()
        self._fetching.submit(self._fetch, request, made)
        return made

    def _fetch(self, request: _Request, made: Future[Any]) -> None:
        n_bytes = 0
        try:
            if self._closing or made.cancelled():
                raise RuntimeError("the data set was closed while it made a batch")
            request.index = self._images.good_from(request.index)
            data = self._images.cached(request.index)
            if data is None:
                n_bytes = self._images.n_bytes(request.index)
                self._memory.take(n_bytes)
                begin = time.perf_counter()
                data = self._images.fetch(request.index)
                self._images.count(cache_misses=1, fetch_s=time.perf_counter() - begin)
            # It may wait for a shard, so it is read here: those that decode let go of what others wait for.
            request.target = self._images.target(request.index)
            self._decoding.submit(self._decode, request, data, n_bytes, made)
        except BaseException as error:
            self._memory.give(n_bytes)
            made.set_exception(error)

    def _decode(self, request: _Request, data: Any, n_bytes: int, made: Future[Any]) -> None:
        begin = time.perf_counter()
        rng = random.Random(request.rng)  # noqa: S311
        try:
            if self._images.transforms_in_threads:
                image = self._images.make_image(request.index, data, rng)
                image = image if request.row is None else request.row.copy_(image)
                sample = image, self._images.sample_target(request.target)
            else:
                sample = (self._images.decoded(request.index, data), rng), request.target
        except BaseException as error:  # a transform may call sys.exit()
            tell = partial(made.set_exception, error)
        else:
            tell = partial(made.set_result, sample)
        self._memory.give(n_bytes)
        self._images.count(decode_s=time.perf_counter() - begin)
        tell()  # last: a batch that is there has been counted

    def close(self) -> None:
        self._closing = True
        self._fetching.shutdown()
        self._decoding.shutdown()


def _forget_frames(error: BaseException | None) -> None:
    # They are in a circle with the error, and would keep a view of a shard until the garbage is collected.
    while error is not None:
        error.__traceback__, error = None, error.__context__


class Cache(ProcessLocal):
    """Keeps values until its budget is used up, and never evicts any.

    Every epoch reads each sample once, in a new order. A cache that drops its oldest values would almost never hit;
    this one hits as often as its share of the data.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._begin_process_state()

    def _set_process_state(self) -> None:
        self._left = self.n_bytes
        self._values: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: Any) -> Any:
        return self._values.get(key)

    def put(self, key: Any, value: Any, size: int) -> None:
        with self._lock:
            if size <= self._left and key not in self._values:
                # A view would keep all that it is a part of: a whole shard on the disk.
                self._values[key] = bytes(value) if isinstance(value, memoryview) else value
                self._left -= size
