"""Random access to the samples in tar shards that a wids index lists; labelled images among them."""

from __future__ import annotations

import inspect
import os
import threading
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ddp_hydra.data.images.batch_loader import LostSamples, is_of_sample
from ddp_hydra.data.images.dataset import StoredImages
from ddp_hydra.data.images.decode import IMAGE_EXTENSIONS
from ddp_hydra.data.names import class_names
from ddp_hydra.data.shards.cache import GIB, ShardCache
from ddp_hydra.data.shards.index import Index, read_index
from ddp_hydra.data.shards.tar_index import OpenShard, missing_field, not_a_class
from ddp_hydra.storage import Access, bare_url
from ddp_hydra.storage.base import ProcessLocal


class WidsShards(ProcessLocal, Dataset):
    """The samples of tar shards, as dicts: the bytes of each field under its extension, ".jpg" or ".cls".

    The index is read once, here. Each process opens a shard when it first needs it. Shards of this machine are used
    where they are; others are kept in a cache on the local disk that all processes of a host share. Open shards are
    mapped into memory. The data set can be pickled at any time, and read by many threads.

    Args:
        index: a wids-shard-index-v1 JSON file: s3://bucket/key, http(s)://host/path, or a path; or open for reading; or
            a list of shards: [{"url": ..., "nsamples": ...}, ...]. It may say fewer samples than a shard has: the
            others are left out.
        base: the folder or URL that holds the shards; None: the one that the index names, else the index's own.
        dataset: read only the sub-dataset of this name; None: read all.
        cache_dir: the folder for shards from other hosts; None: ddp_hydra/shards in the user's cache folder
            (XDG_CACHE_HOME) of each host. If others may write to it, each user gets a folder in it.
        cache_gb: the most that this folder may hold, GiB.
        prefetch_shards: how many of the shards that `expect` named are downloaded before they are needed.
        access: how URLs are read; None: as the environment says.

    Attributes:
        shards: the shards of the index.
        shard_lengths: how many samples each shard has.
        info: what the index says about the data, e.g. its classes.
        name: of the index, or of the sub-dataset.

    Raises:
        ValueError: an argument is out of its range, or the file is not such an index.
        FileNotFoundError: there is no such file.
        PermissionError: it may not be read.
        ConnectionError: its host is not reachable.
    """

    thread_safe = True
    built_once = True

    def __init__(
        self,
        index: Index,
        *,
        base: str | os.PathLike[str] | None = None,
        dataset: str | None = None,
        cache_dir: str | Path | None = None,
        cache_gb: float = 50,
        prefetch_shards: int = 4,
        access: Access | None = None,
    ) -> None:
        access = access or Access(setting="data.index")
        found = read_index(index, base=base, dataset=dataset, access=access)
        self.shards, self.name, self.info = found.shards, found.name, found.info
        self.shard_lengths = [shard.n_samples for shard in self.shards]
        self._cache = ShardCache(self.shards, cache_dir, int(cache_gb * GIB), prefetch=prefetch_shards, access=access)
        self._begin_process_state()

    def _set_process_state(self) -> None:
        self._ends = list(accumulate(self.shard_lengths))
        self._lock = threading.Lock()
        self._unread = bytearray()
        self._left: list[int] = []

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample.

        Args:
            index: of the sample; negative ones count from the end.

        Returns:
            The bytes of its fields, and `__key__`, `__dataset__`, `__index__`, `__shard__` (URL) and `__shardindex__`
            (the place in the shard).

        Raises:
            IndexError: there is no such sample.
            ValueError: its shard is damaged, or not what the index says.
            FileNotFoundError: its shard does not exist.
            PermissionError: its shard may not be read.
            ConnectionError: the store of its shard is not reachable.
            OSError: there is no space for its shard.
        """
        number, inner = self.find(index)
        shard = self._open(number, inner)
        described = self.shards[number]
        return {
            **{extension: bytes(content) for extension, content in shard.fields(inner).items()},
            "__key__": shard.members.key(inner),
            "__dataset__": described.dataset,
            "__index__": self._ends[number] - described.n_samples + inner,
            "__shard__": described.url,
            "__shardindex__": inner,
        }

    def fields(self, index: int) -> dict[str, memoryview]:
        """Return the fields of a sample by extension, without a copy; raises as `__getitem__`.

        A shard stays in the cache folder as long as one of its fields is kept.
        """
        number, inner = self.find(index)
        return self._open(number, inner).fields(inner)

    def key(self, index: int) -> str:
        """Return the name of a sample: its shard, which is opened for that, and its key; of a lost shard its place."""
        number, inner = self.find(index)
        try:
            key = self._cache.open(number).members.key(inner)
        except (ValueError, FileNotFoundError, PermissionError):
            key = f"[{inner}]"
        return f"{bare_url(self.shards[number].url)}/{key}"

    def expect(self, indices: Sequence[int] | np.ndarray) -> None:
        """Say which samples will be read, so that their shards are downloaded before that.

        Args:
            indices: (n,), of the samples that this process will read, in order. They replace the last call's.
        """
        unread = np.zeros(len(self), np.uint8)
        unread[np.asarray(indices, np.int64)] = 1
        numbers = np.searchsorted(self._ends, np.asarray(indices, np.int64) % len(self), side="right")
        shards, first = np.unique(numbers, return_index=True)
        places = np.flatnonzero(unread)
        left = np.bincount(np.searchsorted(self._ends, places, side="right"), minlength=len(self.shards))
        with self._lock:
            self._unread, self._left = bytearray(unread.tobytes()), left.tolist()
        self._cache.expect(shards[np.argsort(first)].tolist())

    def stats(self) -> dict[str, float]:
        """Return what reading the shards has cost this process so far.

        Returns:
            downloads; bytes; requests; retries; cache_hits: shards that were on the disk when they were opened;
            cache_misses; waited_s: time spent on opening shards, over all threads.
        """
        counts, traffic = self._cache.counts, self._cache.access.traffic
        names = ("downloads", "bytes", "cache_hits", "cache_misses", "waited_s")
        return {**{name: counts[name] for name in names}, "requests": traffic.requests, "retries": traffic.retries}

    def close(self) -> None:
        self._cache.close()

    def find(self, index: int) -> tuple[int, int]:
        """Return the number of a sample's shard, and its place in it."""
        count = self._ends[-1]
        if not -count <= index < count:
            raise IndexError(f"sample {index} was asked for, and there are {count:,}")
        index %= count
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number] - self.shard_lengths[number])

    def _open(self, number: int, inner: int) -> OpenShard:
        # Open a shard to read a sample, and note that this one is read.
        shard = self._cache.open(number)
        index = self._ends[number] - self.shard_lengths[number] + inner
        if self._unread and self._unread[index]:
            with self._lock:
                is_first, self._unread[index] = self._unread[index], 0
                self._left[number] -= is_first
                ends = is_first and not self._left[number]
            if ends:
                self._cache.note_done(number)
        return shard


def field_of(fields: dict[str, memoryview], extensions: Collection[str]) -> memoryview | None:
    # Return the field whose extension is one of `extensions`, e.g. ".jpg", or else the one whose last extension is.
    # Several such fields, as .left.png and .right.png, are an error.
    for extension, content in fields.items():
        if extension in extensions:
            return content
    found = [extension for extension in fields if f".{extension.rpartition('.')[2]}" in extensions]
    if len(found) > 1:
        raise ValueError(
            f"it has the images {', '.join(found)}, and none with one dot (a field begins at a name's first dot)"
        )
    return fields[found[0]] if found else None


_OF_SHARDS = frozenset(inspect.signature(WidsShards).parameters) - {"index", "access"}


class WidsImages(StoredImages):
    """Labelled images of a wids index: one field of a sample is the image, another one its class number.

    Use the `chunked` sampler, which reads few shards at a time. If a shard is missing or damaged, the samples of the
    next shard replace its samples, just as one image replaces another.

    Args:
        index: as in `WidsShards`.
        label: extension of the field that holds the class number as text; None: there is none, and the images are to
            be predicted.
        classes: names of the classes in order, {name: number}, {number: name}, or how many there are; None: what the
            index says (`info.classes`).
        more: arguments of `WidsShards` (base, dataset, cache_dir, cache_gb, prefetch_shards), of `StoredImages`
            (endpoint_url, region, anon and more) and of `ImageDataset` (transform, threads, max_bad_fraction and more).

    Raises:
        ValueError: an argument is out of its range, the file is not such an index, or the classes are not known.
        FileNotFoundError: there is no such file.
        PermissionError: it may not be read.
        ConnectionError: its host is not reachable.
    """

    thread_safe = True
    setting = "data.index"

    def __init__(
        self,
        index: str | os.PathLike[str],
        *,
        label: str | None = ".cls",
        classes: Sequence[str] | Mapping[Any, Any] | int | None = None,
        **more: Any,
    ) -> None:
        shards = {name: more.pop(name) for name in _OF_SHARDS & more.keys()}
        super().__init__(**more)
        self.index = index
        self.label, self.labelled = label and f".{label.lower().lstrip('.')}", label is not None
        self.shards = WidsShards(index, access=self.access, **shards)
        self.shard_lengths = self.shards.shard_lengths
        found = self.shards.info.get("classes") if classes is None and isinstance(self.shards.info, dict) else classes
        if not found and not self.labelled:
            found = []
        elif not found:
            raise ValueError(
                f"{self.where()} does not say which classes there are (info.classes): type data.classes=1000"
            )
        where = f"{self.where()} (info.classes)" if classes is None else "data.classes"
        self.classes = class_names(found, where, "type data.classes=[...] with the names in order")
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.shards)

    def where(self) -> str:
        return bare_url(str(self.index))

    def name(self, index: int) -> str:
        return self.shards.key(index)

    def fetch(self, index: int) -> Any:
        fields = self._fields(index)
        image = field_of(fields, IMAGE_EXTENSIONS)
        if image is None:
            raise ValueError(missing_field("with an image", fields))
        return image

    def target(self, index: int) -> int:
        if self.label is None:
            return -1
        fields = self._fields(index)
        text = fields.get(self.label)
        if text is None:
            raise ValueError(f"{missing_field(self.label, fields)}: check data.label=...")
        try:
            number = int(bytes(text))
        except ValueError:
            raise ValueError(not_a_class(self.label, text)) from None
        if not 0 <= number < len(self.classes):
            raise ValueError(f"its class is {number}, and there are {len(self.classes)}: check data.classes=...")
        return number

    def _fields(self, index: int) -> dict[str, memoryview]:
        try:
            return self.shards.fields(index)
        except (ValueError, FileNotFoundError, PermissionError) as error:
            if not is_of_sample(error, self._works):
                raise
            number, inner = self.shards.find(index)
            shard = self.shards.shards[number]
            raise LostSamples(str(error), bare_url(shard.url), index - inner, shard.n_samples) from None

    def expect(self, indices: list[int]) -> None:
        self.shards.expect(indices)

    def stats(self) -> dict[str, float]:
        """Return what reading has cost this process so far, as `ImageDataset.stats` does; cache hits count shards."""
        return super().stats() | self.shards.stats()

    def close(self) -> None:
        self.shards.close()  # first: it ends the waiting of threads that fetch
        super().close()
