"""Samples in tar shards that a wids index lists, each within reach at any time."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ddp_hydra.data.shards.cache import GIB, OpenShard, ShardCache
from ddp_hydra.data.shards.decode import decode_field
from ddp_hydra.data.shards.index import read_index, shown
from ddp_hydra.storage import Access

Sample = dict[str, Any]


class WidsShards(Dataset):
    """The samples of tar shards, as dicts: each field under its extension, ".jpg" or ".cls".

    The index is read once, here; shards are opened when they are first needed, in each process anew. Those of this
    machine are used where they are, others are kept in a cache on the local disk that all processes of a host
    share. Open shards are mapped into memory, and reading a sample copies nothing. It can be pickled at any time,
    and read from many threads.

    Args:
        index: a wids-shard-index-v1 JSON file: s3://bucket/key, http(s)://host/path, or a path.
        base: the folder or URL below which the shards are; None: where the index says, or else beside it.
        dataset: only the shards of the sub-dataset of this name; None: all.
        cache_dir: where shards from elsewhere are kept; None: ddp_hydra/shards in the user's cache folder
            (XDG_CACHE_HOME) of each host. Where others may write to it, each user has a part of it.
        cache_gb: what that folder may take, GiB.
        prefetch_shards: shards downloaded before they are needed, where `expect` says which.
        access: how URLs are read; None: as the environment says.
        decode: decode the fields by their extensions, see `decode_field`; false: leave them as they are in the mapped
            shard (memoryviews, which another process can't be sent: there, make them bytes).

    Attributes:
        shards: the shards of the index.
        shard_lengths: samples in each of them.
        info: what the index says about the data, e.g. its classes.
        name: of the index, or the sub-dataset.

    Raises:
        ValueError: an argument out of its range, or a file that is no such index.
        FileNotFoundError: there is no such file.
        PermissionError: it may not be read.
        ConnectionError: its host is not reachable.
    """

    built_once = True

    def __init__(
        self,
        index: str,
        *,
        base: str | None = None,
        dataset: str | None = None,
        cache_dir: str | Path | None = None,
        cache_gb: float = 50,
        prefetch_shards: int = 4,
        access: Access | None = None,
        decode: bool = True,
    ) -> None:
        access = access or Access(setting="data.index")
        found = read_index(index, base=base, dataset=dataset, access=access)
        self.shards, self.name, self.info = found.shards, found.name, found.info
        self.shard_lengths = [shard.n_samples for shard in self.shards]
        self.decode = decode
        self._transforms: list[Callable[[Sample], Sample]] = []
        self._cache = ShardCache(self.shards, cache_dir, int(cache_gb * GIB), prefetch=prefetch_shards, access=access)
        self._reset()

    def _reset(self) -> None:
        """Set what belongs to one process, and what is quickly computed."""
        self._ends = list(accumulate(self.shard_lengths))
        self._lock = threading.Lock()
        self._unread = bytearray()
        self._expected: list[int] = []
        self._left: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_ends", "_lock", "_unread", "_expected", "_left")
        return {name: value for name, value in self.__dict__.items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def add_transform(self, transform: Callable[[Sample], Sample]) -> WidsShards:
        """Let `transform` have each sample, after those that were added before; return this data set."""
        self._transforms.append(transform)
        return self

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        """Return a sample.

        Args:
            index: of the sample; negative ones count from the end.

        Returns:
            Its fields, and `__key__`, `__dataset__`, `__index__`, `__shard__` (URL) and `__shardindex__`.

        Raises:
            IndexError: there is no such sample.
            ValueError: its shard is damaged or not what the index says, or a field can't be decoded.
            FileNotFoundError: its shard is not there.
            PermissionError: its shard may not be read.
            ConnectionError: the store of its shard is not reachable.
            OSError: there is no room for its shard.
        """
        number, inner = self._find(index)
        shard = self._open(number, inner)
        described = self.shards[number]
        sample: Sample = dict(shard.fields(inner))
        if self.decode:
            for extension, content in sample.items():
                try:
                    sample[extension] = decode_field(extension, content)
                except ValueError as error:
                    raise ValueError(
                        f"sample {shard.members.key(inner)!r} of {shown(described.url)}: {error}"
                    ) from None
        sample["__key__"] = shard.members.key(inner)
        sample["__dataset__"] = described.dataset
        sample["__index__"] = self._ends[number] - described.n_samples + inner
        sample["__shard__"] = described.url
        sample["__shardindex__"] = inner
        for transform in self._transforms:
            sample = transform(sample)
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch."""
        return [self[index] for index in indices]

    def fields(self, index: int) -> dict[str, memoryview]:
        """Return the bytes of a sample's fields under their extensions, without a copy; raises as `__getitem__`."""
        number, inner = self._find(index)
        return self._open(number, inner).fields(inner)

    def key(self, index: int) -> str:
        """Return the name of a sample, for messages: its shard's URL, and its key where the shard is open."""
        number, inner = self._find(index)
        shard = self._cache.held.get(number)
        return f"{shown(self.shards[number].url)}/{shard.members.key(inner) if shard else f'[{inner}]'}"

    def expect(self, indices: Sequence[int] | np.ndarray) -> None:
        """Say which samples are going to be read, in order, so that their shards are there in time.

        Args:
            indices: of the samples that this process reads; it takes the place of what was expected before.
        """
        unread = np.zeros(len(self), np.uint8)
        unread[np.asarray(indices, np.int64)] = 1
        numbers = np.searchsorted(self._ends, np.asarray(indices, np.int64) % len(self), side="right")
        shards, first = np.unique(numbers, return_index=True)
        places = np.flatnonzero(unread)
        left = np.bincount(np.searchsorted(self._ends, places, side="right"), minlength=len(self.shards))
        with self._lock:
            self._unread, self._left, self._expected = bytearray(unread.tobytes()), left.tolist(), left.tolist()
        self._cache.expect(shards[np.argsort(first)].tolist())

    def stats(self) -> dict[str, float]:
        """Return what the shards cost this process so far.

        Returns:
            downloads; bytes; requests; retries; cache_hits: shards that were there when they were opened; cache_misses;
            waited_s: for shards, over all threads.
        """
        counts, traffic = dict(self._cache.counts), self._cache.access.traffic
        return {
            "downloads": counts["downloads"],
            "bytes": counts["bytes_downloaded"],
            "requests": traffic.requests,
            "retries": traffic.retries,
            "cache_hits": counts["hits"],
            "cache_misses": counts["misses"],
            "waited_s": counts["waited_s"],
        }

    def close(self) -> None:
        """Stop the downloads and let go of the shards."""
        self._cache.close()

    def _find(self, index: int) -> tuple[int, int]:
        """Return the number of a sample's shard, and the sample's place there."""
        count = self._ends[-1]
        if not -count <= index < count:
            raise IndexError(f"sample {index} was asked for, and there are {count:,}")
        index %= count
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number] - self.shard_lengths[number])

    def _open(self, number: int, inner: int) -> OpenShard:
        """Return the shard of a sample that is going to be read now."""
        shard = self._cache.held.get(number)
        if shard is None:
            shard = self._cache.open(number)
        if self._unread and self._unread[self._ends[number] - self.shard_lengths[number] + inner]:
            self._note_read(number, self._ends[number] - self.shard_lengths[number] + inner)
        return shard

    def _note_read(self, number: int, index: int) -> None:
        """Notice where an expected shard begins to be read, and where all of it has been."""
        with self._lock:
            if not self._unread[index]:
                return
            self._unread[index] = 0
            begins = self._left[number] == self._expected[number]
            self._left[number] -= 1
            ends = not self._left[number]
        if begins:
            self._cache.note_started(number)
        if ends:
            self._cache.note_done(number)


def field_of(fields: dict[str, memoryview], extensions: Collection[str]) -> memoryview | None:
    """Return the first field whose last extension is one of these, in lower case."""
    for extension, content in fields.items():
        if f".{extension.lower().rpartition('.')[2]}" in extensions:
            return content
    return None
