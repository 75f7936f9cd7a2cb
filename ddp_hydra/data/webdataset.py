"""Reads tar shards with webdataset, in an order that depends on seed and epoch only, so that a run can resume."""

from __future__ import annotations

import errno
import os
import random
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from glob import glob
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ddp_hydra.data.images.batch_loader import MOST_IN_A_ROW, TooManyBadSamplesError, too_many
from ddp_hydra.data.names import class_names, is_leftover
from ddp_hydra.data.shards.tar_index import Header, damage_of, missing_field, not_a_class, split_name
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage import bare_url
from ddp_hydra.storage.urls import as_text

_ASSUMED = 1000
"""Length of a pass of a rank, where nobody knows it, for judging bad samples before its end."""
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
"""Extensions whose content webdataset makes whole numbers of."""


class TarSamples(IterableDataset):
    """Gives the samples of tar shards, shard by shard, as webdataset reads them.

    The ranks share the shards, in another way each epoch. If there are fewer shards than ranks, they share the samples.
    A sample that lacks a field, or has one that can't be decoded, is left out. So is what follows the damage in a
    shard, or all of one that is missing or no tar file: as many samples count as bad as shards have on average.

    Args:
        urls: paths or URLs of the shards, with {000..127} for many, or * in a path; "pipe:aws s3 cp … -" reads from a
            command.
        fields: fields of a sample, in the order of the batch: [jpg;png, cls]; the first of those that ; separates.
        decode: how webdataset decodes images: torchrgb, pil, …; None leaves them as bytes.
        transform: sample, a tuple of its fields -> what goes into the batch.
        shuffle: shuffle the shards in each epoch.
        shuffle_buffer: samples of the buffer in which a rank's are mixed; 0: keep their order.
        seed: of the order.
        max_bad_fraction: the largest share of bad samples that is allowed in a pass; before its end, in `n_samples`.
        n_samples: how many samples all ranks read in an epoch; None: nobody knows, 1,000 for each rank are assumed.
        classes: names of the classes in the field cls in order, {name: number}, {number: name}, or how many there are;
            another class number is a bad sample; None: not known.

    Attributes:
        bad: {shard and key, or shard: what is wrong} of the samples that were left out in this process.
        bad_counts: {shard: number of its samples that were left out}.

    Raises:
        ConfigError: there are no shards, or an argument is out of its range.
    """

    thread_safe = True

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        fields: Sequence[str] = ("jpg;png;jpeg", "cls"),
        decode: str | None = "torchrgb",
        transform: Callable[[tuple[Any, ...]], Any] | None = None,
        shuffle: bool = True,
        shuffle_buffer: int = 0,
        seed: int = 0,
        max_bad_fraction: float = 0.01,
        n_samples: int | None = None,
        classes: Sequence[str] | Mapping[Any, Any] | int | None = None,
    ) -> None:
        try:
            from webdataset.autodecode import imagespecs
        except ImportError:
            raise ModuleNotFoundError("it needs webdataset: type `pip install 'ddp-hydra[webdataset]'`") from None
        if not urls:
            raise ConfigError("no shards are given: type data.urls=…, and data.val_urls=… or data.val=null")
        if decode is not None and decode not in imagespecs:
            raise ConfigError(f"data.decode={decode}: give {', '.join(sorted(imagespecs))}, or null")
        named: Any = as_text(urls)
        self.urls = [url for pattern in ([named] if isinstance(named, str) else named) for url in _expanded(pattern)]
        self.fields = [_choice(field) for field in ([fields] if isinstance(fields, str) else fields)]
        self.decode, self.transform = decode, transform
        self.shuffle, self.shuffle_buffer, self.seed = shuffle, shuffle_buffer, seed
        if not 0 <= max_bad_fraction <= 1:
            raise ConfigError(f"data.max_bad_fraction={max_bad_fraction:g}: give a share from 0 to 1")
        self.max_bad_fraction, self.n_samples = max_bad_fraction, n_samples
        self.bad, self.bad_counts = dict[str, str](), dict[str, int]()
        names = class_names(classes or (), "data.classes", "give [...] with the names in order")
        self.classes = [str(name) for name in names] or None
        self._counts = {"samples": 0, "bytes": 0}
        self.epoch, self.rank, self.world_size = 0, 0, 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def of_rank(self, rank: int, world_size: int) -> TarSamples | None:
        """Return the part of a rank; None if there are fewer shards than ranks."""
        if len(self.urls) < world_size:
            return None
        part = copy(self)
        part.rank, part.world_size = rank, world_size
        return part

    def stats(self) -> dict[str, float]:
        """Return what was read in this process so far: samples, bytes, bad_samples."""
        return {**self._counts, "bad_samples": sum(self.bad_counts.get(name, 1) for name in self.bad)}

    def __iter__(self) -> Iterator[Any]:
        import webdataset

        urls = list(self.urls)
        if self.shuffle:
            np.random.RandomState([self.seed & 0xFFFFFFFF, self.epoch]).shuffle(urls)
        expected = -(-self.n_samples // self.world_size) if self.n_samples else _ASSUMED
        seen = bad = in_a_row = 0

        def samples(own: Sequence[str]) -> Iterator[dict[str, Any]]:
            nonlocal seen, bad
            lengths: list[int] = []  # of the shards that were read whole
            for url in own:
                n_read = 0
                try:
                    for sample in _samples_of(url):
                        n_read += 1
                        yield sample
                    lengths.append(n_read)
                except _LostShard as error:
                    known = self.n_samples / len(urls) if self.n_samples else mean(lengths or [_ASSUMED])
                    left = max(1, round(known) - n_read)
                    seen, bad = seen + left, bad + left
                    self.bad[error.shard], self.bad_counts[error.shard] = error.reason, left
                    try:
                        self._judge(bad, max(seen, expected), 0)
                    except TooManyBadSamplesError as too_many:
                        raise TooManyBadSamplesError(f"{error}. So {too_many}") from None

        own = urls[self.rank :: self.world_size]
        if (info := get_worker_info()) is not None:  # in a DataLoader of the user, as webdataset does
            own = own[info.id :: info.num_workers]
        found: Any = samples(own)
        if self.shuffle_buffer:
            chance = random.Random(f"{self.seed} {self.epoch} {self.rank}")  # noqa: S311
            found = webdataset.shuffle(self.shuffle_buffer, initial=self.shuffle_buffer, rng=chance)(found)
        handlers = [] if self.decode is None else [webdataset.autodecode.ImageHandler(self.decode)]
        decoder = webdataset.autodecode.Decoder(handlers)
        for sample in found:
            seen += 1
            self._counts["samples"] += 1
            self._counts["bytes"] += sum(len(content) for content in sample.values() if isinstance(content, bytes))
            try:
                fields = self._decoded(sample, decoder)
            except ValueError as error:
                bad, in_a_row = bad + 1, in_a_row + 1
                self.bad[f"{bare_url(sample['__url__'])}/{sample['__key__']}"] = str(error)
                self._judge(bad, max(seen, expected), in_a_row)
                continue
            in_a_row = 0
            yield fields if self.transform is None else self.transform(fields)
        self._judge(bad, seen, 0)

    def _decoded(self, sample: dict[str, Any], decoder: Any) -> tuple[Any, ...]:
        from webdataset.autodecode import DecodingError

        chosen = []
        for choice in self.fields:
            name = next((name for name in choice if name in sample), None)
            if name is None:
                found = [name for name in sample if not name.startswith("__")]
                raise ValueError(missing_field(" or ".join(choice), found))
            chosen.append(name)
        try:
            decoded = decoder({name: sample[name] for name in chosen})
        except DecodingError as error:
            cause = error.__cause__
            if isinstance(cause, ImportError | MemoryError):
                raise cause from None
            if error.k.rpartition(".")[2] in _NUMBERS:
                raise ValueError(not_a_class(error.k, sample[error.k])) from None
            is_image = type(cause).__name__ == "UnidentifiedImageError"  # its text is the address of an object
            reason = "it is no image" if is_image else str(cause) or type(cause).__name__
            raise ValueError(f"its field {error.k} can't be decoded: {reason}") from None
        number = decoded.get("cls", 0)
        if self.classes is not None and not 0 <= number < len(self.classes):
            raise ValueError(f"its class is {number}, and there are {len(self.classes)}: check data.classes=...")
        return tuple(decoded[name] for name in chosen)

    def _judge(self, bad: int, n_samples: int, in_a_row: int) -> None:
        if bad > self.max_bad_fraction * n_samples or in_a_row >= MOST_IN_A_ROW:
            raise too_many(bad, n_samples, self.max_bad_fraction, self.bad)


def _choice(field: str) -> list[str]:
    return [name if name.startswith("__") else name.strip().lstrip(".").lower() for name in field.split(";")]


def _expanded(pattern: str) -> list[str]:
    from webdataset.gopen import gopen_schemes, rewrite_url
    from webdataset.shardlists import expand_urls

    found = []
    for url in expand_urls(pattern):
        scheme = "pipe" if url.startswith("pipe:") else rewrite_url(url).partition("://")[0] if "://" in url else ""
        if scheme not in ("", "file", *gopen_schemes):
            raise ConfigError(
                f"webdataset can't read {bare_url(url)}: give data.urls='pipe:aws s3 cp {scheme}://... -' or data=wids"
            )
        is_pattern = not scheme and set("*?[") & set(url) and not Path(url).exists()
        matches = sorted(glob(url)) if is_pattern else [url]  # noqa: PTH207 (the pattern may be absolute)
        if not matches:
            raise ConfigError(f"no file is named {url}: check data.urls=… and data.val_urls=…")
        found += matches
    return found


def _samples_of(url: str) -> Iterator[dict[str, Any]]:
    # Yield the samples of a shard. Neighbours in a tar file are one sample as `tar_index.TarMembers` says.
    for key, members in groupby(_members_of(url), lambda member: split_name(member[0])[0]):
        sample: dict[str, Any] = {"__key__": key, "__url__": url}
        for name, content in members:
            extension = split_name(name)[1][1:]
            if extension in sample:
                raise _LostShard(url, f"{name} is in it twice: give each sample a name of its own")
            sample[extension] = content
        yield sample


def _members_of(url: str) -> Iterator[tuple[str, bytes]]:
    # Yield name and content of the files in a shard that belong to samples.
    from webdataset.gopen import gopen

    # webdataset's own reader leaves files open, and takes a damaged header for the end.
    try:
        with gopen(url) as stream, tarfile.open(fileobj=stream, mode="r|*", tarinfo=Header) as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep them
                if is_leftover(member.name) or not split_name(member.name)[1]:
                    continue
                if member.islnk() or member.issym():
                    raise _LostShard(
                        url, f"{member.name} is a link: write it anew with tar --dereference --hard-dereference"
                    )
                if (file := tar.extractfile(member)) is not None:
                    yield member.name, file.read()
            if (damage := damage_of(tar)) is not None:
                raise _LostShard(url, f"it is damaged, or only the start of a tar file ({damage})")
    except FileNotFoundError:
        reason = "there is no such file: check data.urls=... and data.val_urls=..."
    except IsADirectoryError:
        reason = f"it is a folder: type data.urls='{url.rstrip('/')}/*.tar'"
    except tarfile.ReadError as error:
        why = str(error).splitlines()[0].rstrip(":")
        damage_or_kind = f"it is damaged, or no tar file, plain or packed by gzip, bzip2 or xz ({why})"
        reason = "it is empty" if why == "empty file" else damage_or_kind
    except (tarfile.TarError, EOFError, zlib.error) as error:
        reason = f"it is damaged ({error})"
    except PermissionError as error:
        reason = f"{error.strerror}: check its rights and those of its folders"
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _LostShard(url, "it is a link to itself") from None
        code = re.search(r": exit (\d+)", str(error))  # of the command that gopen reads from, curl for web servers
        if code is None:
            raise
        gone = f"the shard {bare_url(url)} can't be read: its command ended with exit code {code[1]}"
        raise ConnectionError(gone) from None
    else:
        return
    raise _LostShard(url, reason)


class _LostShard(TooManyBadSamplesError):
    def __init__(self, url: str, reason: str) -> None:
        self.shard, self.reason = bare_url(url), reason
        super().__init__(f"the shard {self.shard} can't be read: {reason}")
