"""wids' classes: `from ddp_hydra.compat import wids`. `python -m ddp_hydra.compat.wids` has its index commands."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler

from ddp_hydra.console.text import expanded
from ddp_hydra.data.shards.cache import GIB
from ddp_hydra.data.shards.index import Index
from ddp_hydra.data.shards.tar_index import decode_field
from ddp_hydra.data.wids import WidsShards

IMAGES = ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm")
LEFT_OPEN = 1e6
"""A smaller cache_size is a number of shards, as in early versions of wids, and says nothing of bytes."""

_bounds: dict[Path, float] = {}


class ShardListDataset(Dataset):
    """The samples of tar shards as dicts: `sample[".jpg"]` is a PIL image, `sample[".cls"]` a number.

    Args:
        shards: URL or path of an index; an index that is open for reading; or a list of {"url", "nsamples"} dicts.
        cache_size: most bytes of the cache folder; None: 50 GiB, or what `create_cleanup_background_process` was given.
        cache_dir: folder for shards from other hosts; None: WIDS_CACHE, or one in the user's cache folder.
        lru_size: not needed: open shards cost no memory.
        dataset_name: of a list of shards.
        transformations: "PIL", "numpy", a function of the sample, or a list of them. Before "PIL" or "numpy", fields
            are open files.
        keep: shards stay in the cache folder in any case, as far as there is room.
        base: folder or URL of the shards.
        more: arguments of `ddp_hydra.data.WidsShards`: dataset, access, prefetch_shards.

    Attributes:
        shards: list of {"url", "nsamples"} dicts.
        lengths: how many samples each shard has; cum_lengths: their sums; total_length: of all.

    Raises:
        ValueError: there is no such transformation, or as `WidsShards`.
        TypeError: `localname` is given.
    """

    def __init__(
        self,
        shards: Index,
        cache_size: float | None = None,
        cache_dir: str | Path | None = None,
        lru_size: int = 10,
        dataset_name: str | None = None,
        localname: Any = None,
        transformations: Any = "PIL",
        keep: bool = False,
        base: str | None = None,
        options: Any = None,
        **more: Any,
    ) -> None:
        if localname is not None:
            raise TypeError(
                "localname is not taken, because files of the cache have names of their own, by which data sets share "
                "them: give cache_dir=<folder>"
            )
        cache_dir = cache_dir or os.environ.get("WIDS_CACHE")
        if cache_size is None or cache_size < LEFT_OPEN:
            cache_size = None if cache_dir is None else _bounds.get(_folder(cache_dir))
        bound: dict[str, Any] = {} if cache_size is None else {"cache_gb": cache_size / GIB}
        self.data = WidsShards(shards, base=base, cache_dir=cache_dir, **bound, **more)
        self.dataset_name = dataset_name or self.data.name
        self.shards = [{"url": shard.url, "nsamples": shard.n_samples} for shard in self.data.shards]
        self.lengths = self.data.shard_lengths
        self.cum_lengths = np.array(list(accumulate(self.lengths)))
        self.total_length = len(self.data)
        given = transformations if isinstance(transformations, (list, tuple)) else [transformations]
        self.transformations = [_transformation(one) for one in given]
        self._accesses = 0

    def add_transform(self, transform: Callable[[dict[str, Any]], Any]) -> ShardListDataset:
        """Apply a function to each sample, after those before it; return the data set."""
        self.transformations.append(transform)
        return self

    def __len__(self) -> int:
        return self.total_length

    def __getitem__(self, index: int) -> Any:
        """Return a sample; raises as `WidsShards`."""
        self._accesses += 1
        sample: Any = {
            name: io.BytesIO(value) if isinstance(value, bytes) else value for name, value in self.data[index].items()
        }
        for transform in self.transformations:
            sample = transform(sample)
        return sample

    def get_stats(self) -> tuple[int, int]:
        """Return how many samples were read, and how many shards had to be downloaded, by this process."""
        return self._accesses, int(self.data.stats()["downloads"])

    def check_cache_misses(self) -> None:
        """Do nothing: the samplers read each shard once, and what the cache holds is not downloaded again."""

    def close(self) -> None:
        """Stop the downloads and close the shards."""
        self.data.close()


def _transformation(given: Any) -> Callable[[dict[str, Any]], Any]:
    if given in ("PIL", "numpy"):
        return partial(_decoded, numpy=given == "numpy")
    if not callable(given):
        raise ValueError(f"a transformation is {given!r}, and must be 'PIL', 'numpy' or a function of a sample")
    return given


def _decoded(sample: dict[str, Any], numpy: bool) -> dict[str, Any]:
    """Decode the fields of a sample; images become PIL images or arrays, (height, width[, channels])."""
    return {name: _decoded_field(name, value, numpy) for name, value in sample.items()}


def _decoded_field(name: str, value: Any, numpy: bool) -> Any:
    if not isinstance(value, io.BytesIO):
        return value
    parts = name.lower().split(".")
    is_packed = parts[-1] == "gz"
    if parts[-2 if is_packed else -1] in IMAGES:
        from PIL import Image

        content = gzip.decompress(value.getbuffer()) if is_packed else value.getvalue()
        image = Image.open(io.BytesIO(content))
        return np.asarray(image) if numpy else image
    found = decode_field(name, value.getbuffer())
    return io.BytesIO(found) if isinstance(found, bytes) else found


def create_cleanup_background_process(
    pattern: str | Path, maxsize: float = 1e12, maxfiles: int = 1000, every: float = 60
) -> CleanupProcess:
    """Bound a cache folder. No process is needed: data sets keep to the bound whenever they download a shard.

    Args:
        pattern: the cache folder, or its files, as "_cache/*". It is for data sets that are made later in this process.
        maxsize: bytes.
        maxfiles: not used: the bound is in bytes.
        every: not used.
    """
    _bounds[_folder(pattern)] = maxsize
    return CleanupProcess()


def _folder(pattern: str | Path) -> Path:
    path = expanded(pattern).absolute()
    while any(char in path.name for char in "*?["):
        path = path.parent
    return path


class CleanupProcess:
    """Stands for the process that wids would start."""

    def start(self) -> None:
        """Do nothing."""

    def is_alive(self) -> bool:
        """Return True: the bound holds."""
        return True

    def terminate(self) -> None:
        """Do nothing."""

    def join(self, timeout: float | None = None) -> None:
        """Return at once."""


def keep_most_recent_files(pattern: str, maxsize: float = 1e12, maxfiles: int = 1000, debug: bool = False) -> None:
    """Delete the oldest files of a folder.

    Args:
        pattern: of paths, as "folder/*".
        maxsize: bytes that may stay.
        maxfiles: number of files that may stay.
        debug: not used.
    """
    path = Path(pattern)
    found = [(file.stat(), file) for file in path.parent.glob(path.name) if file.is_file()]
    found.sort(key=lambda item: item[0].st_mtime_ns, reverse=True)
    total = 0
    for number, (status, file) in enumerate(found):
        total += status.st_size
        if total > maxsize or number >= maxfiles:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()


class _RangeSampler(Sampler):
    """Yields the samples of one range after the other.

    Attributes:
        ranges: list of (first, end).
        epoch: number of the next pass; it grows by itself, or is set by `set_epoch`.
    """

    def __init__(self, ranges: list[tuple[int, int]], seed: int, shuffle: bool, shufflefirst: bool) -> None:
        self.ranges = ranges
        self.seed = seed
        self.shuffle = shuffle
        self.shufflefirst = shufflefirst
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def __iter__(self) -> Iterator[int]:
        """Yield indices. The first pass keeps the order of the ranges, unless `shufflefirst` is set."""
        chance = random.Random(f"{self.seed}/{self.epoch}")  # noqa: S311
        ranges = list(self.ranges)
        if self.shuffle and (self.shufflefirst or self.epoch > 0):
            chance.shuffle(ranges)
        self.epoch += 1
        for first, end in ranges:
            inside = list(range(first, end))
            if self.shuffle:
                chance.shuffle(inside)
            yield from inside


class ChunkedSampler(_RangeSampler):
    """Cuts a data set into chunks, and shuffles the chunks, and the samples in each.

    Args:
        dataset: has a length.
        num_samples: number of samples, from the first; or (first, end); None: all.
        chunksize: samples in a chunk.
        seed: of the order, together with the epoch.
        shuffle: whether to shuffle.
        shufflefirst: whether to shuffle the chunks of the first pass, too.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_samples: int | tuple[int, int] | None = None,
        chunksize: int = 2000,
        seed: int = 0,
        shuffle: bool = False,
        shufflefirst: bool = False,
    ) -> None:
        whole = len(dataset) if num_samples is None else num_samples
        first, end = (0, whole) if isinstance(whole, int) else whole
        if not 0 <= first < end <= len(dataset) or chunksize < 1:
            raise ValueError(
                f"num_samples={num_samples} and chunksize={chunksize}: the data set has {len(dataset):,} samples, of "
                "which some have to be chosen, and a chunk has at least one"
            )
        ranges = [(start, min(start + chunksize, end)) for start in range(first, end, chunksize)]
        super().__init__(ranges, seed, shuffle, shufflefirst)


def DistributedChunkedSampler(  # noqa: N802 (its name in wids)
    dataset: Any,
    *,
    num_replicas: int | None = None,
    num_samples: int | None = None,
    rank: int | None = None,
    shuffle: bool = True,
    shufflefirst: bool = False,
    seed: int = 0,
    drop_last: bool | None = None,
    chunksize: int = 1_000_000,
) -> ChunkedSampler:
    """Return a `ChunkedSampler` for this rank's part of the samples; all parts have the same length.

    Args:
        dataset: has a length.
        num_replicas: number of ranks; None: of the process group, or 1 without one.
        num_samples: number of samples that are divided among the ranks; None: all. A remainder is left out.
        rank: this rank; None: of the process group, or 0 without one.
        shuffle: as in `ChunkedSampler`, and so are shufflefirst, seed and chunksize.
        drop_last: not used.
    """
    grouped = dist.is_available() and dist.is_initialized()
    num_replicas = num_replicas or (dist.get_world_size() if grouped else 1)
    rank = rank if rank is not None else (dist.get_rank() if grouped else 0)
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank={rank}, and must be from 0 to {num_replicas - 1}, for num_replicas={num_replicas}")
    own = (len(dataset) if num_samples is None else num_samples) // num_replicas
    return ChunkedSampler(
        dataset,
        num_samples=(rank * own, (rank + 1) * own),
        chunksize=chunksize,
        seed=seed,
        shuffle=shuffle,
        shufflefirst=shufflefirst,
    )


class ShardedSampler(_RangeSampler):
    """Shuffles the shards of a data set, and the samples in each.

    Args:
        dataset: a `ShardListDataset`.
        lengths: of the shards; None: the lengths that the data set gives.
        batch_size: not used.
        shufflefirst: whether to shuffle the shards of the first pass, too.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        lengths: Sequence[int] | None = None,
        batch_size: int | None = None,
        shufflefirst: bool = False,
    ) -> None:
        ends = accumulate(dataset.lengths if lengths is None else lengths, initial=0)
        super().__init__(list(pairwise(ends)), 0, True, shufflefirst)
