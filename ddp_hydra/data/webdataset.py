"""Reads tar shards with webdataset, in an order that depends on seed and epoch only, so that a run can resume."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from ddp_hydra.errors import ConfigError


class TarSamples(IterableDataset):
    """Gives the samples of tar shards, shard by shard, as webdataset reads them.

    The ranks share the shards, in another way each epoch. If there are fewer shards than ranks, they share the samples.

    Args:
        urls: paths or URLs of the shards, with {000..127} for many; "pipe:aws s3 cp … -" reads from a command.
        fields: fields of a sample, in the order of the batch: [jpg;png, cls].
        decode: how webdataset decodes images: torchrgb, pil, …; None leaves them as bytes.
        transform: sample, a tuple of its fields -> what goes into the batch.
        shuffle: shuffle the shards in each epoch.
        shuffle_buffer: mix the samples of a rank in a buffer of so many; 0: keep their order.
        seed: of the order.

    Raises:
        ConfigError: there are no shards.
    """

    thread_safe = True

    def __init__(
        self,
        urls: str | Sequence[str] | None,
        fields: Sequence[str] = ("jpg;png;jpeg", "cls"),
        decode: str | None = "torchrgb",
        transform: Callable[[tuple[Any, ...]], Any] | None = None,
        shuffle: bool = True,
        shuffle_buffer: int = 0,
        seed: int = 0,
    ) -> None:
        try:
            from webdataset.shardlists import expand_urls
        except ImportError:
            raise ModuleNotFoundError("it needs webdataset: type `pip install 'ddp-hydra[webdataset]'`") from None
        if not urls:
            raise ConfigError("no shards are given: type data.urls=…, and data.val_urls=… or data.val=null")
        self.urls = [url for pattern in ([urls] if isinstance(urls, str) else urls) for url in expand_urls(pattern)]
        self.fields, self.decode, self.transform = list(fields), decode, transform
        self.shuffle, self.shuffle_buffer, self.seed = shuffle, shuffle_buffer, seed
        self.epoch, self.rank, self.world_size = 0, 0, 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self.epoch = epoch

    def of_rank(self, rank: int, world_size: int) -> TarSamples | None:
        """Return the part of a rank; None if there are fewer shards than ranks."""
        if len(self.urls) < world_size:
            return None
        part = copy(self)
        part.rank, part.world_size = rank, world_size
        return part

    def __iter__(self) -> Iterator[Any]:
        import webdataset
        from webdataset import tariterators

        urls = list(self.urls)
        if self.shuffle:
            np.random.RandomState([self.seed & 0xFFFFFFFF, self.epoch]).shuffle(urls)
        files = tariterators.tar_file_expander(opened(urls[self.rank :: self.world_size]))
        stages = [lambda: tariterators.group_by_keys(files)]
        if self.shuffle_buffer:
            chance = random.Random(f"{self.seed} {self.epoch} {self.rank}")  # noqa: S311
            stages.append(webdataset.shuffle(self.shuffle_buffer, initial=self.shuffle_buffer, rng=chance))
        stages.append(webdataset.decode(*([self.decode] if self.decode else [])))
        stages.append(webdataset.to_tuple(*self.fields))
        if self.transform is not None:
            stages.append(webdataset.map(self.transform))
        yield from webdataset.DataPipeline(*stages)


def opened(urls: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each shard as an open file, and close it after: webdataset's own pipelines leave files open."""
    from webdataset.gopen import gopen

    for url in urls:
        with gopen(url) as stream:
            yield {"url": url, "stream": stream}
