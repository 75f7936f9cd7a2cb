"""Rows of Parquet files: some columns are the features, one is the target."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from ddp_hydra.data import parquet_files
from ddp_hydra.data.draws import Indices
from ddp_hydra.data.parquet_files import PartFile, open_files
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage import Access, bare_url
from ddp_hydra.storage.base import ProcessLocal, TransferCounters
from ddp_hydra.storage.urls import as_text


class RowBatch(Sequence[Any]):
    """Rows whose batch is made already: x, or (x, y)."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch[0] if isinstance(self.batch, tuple) else self.batch)

    def __getitem__(self, place: Any) -> Any:
        return tuple(part[place] for part in self.batch) if isinstance(self.batch, tuple) else self.batch[place]

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.batch, strict=True) if isinstance(self.batch, tuple) else iter(self.batch)


class ParquetRows(ProcessLocal):
    """Gives (x, y): the features of a row, (features,) float32, and its target, float32, or int64 for whole numbers.

    The row groups of the files are read when their rows are asked for, and kept in memory. If they do not all fit, take
    sampler=chunked: it reads a few row groups at a time.

    A folder like `band=1` around a file is a column `band`, as Hive and Spark write it. A column of vectors of one
    length is as many features as they have numbers.

    Args:
        files: URL or path of a Parquet file or of a folder of them, or a pattern with *, ** and ?, or several.
        target: column of the target; None: the samples are x alone.
        features: columns of the features, in this order, or one; None: all the others but the index of pandas.
        fill: replaces missing features; None: they are an error.
        cache_mb: memory for row groups, MiB per process that reads; one is kept in any case.
        access: arguments of `storage.Access`: endpoint_url, region, anon, client and more.

    Attributes:
        features: columns of the features, in their order.
        shard_lengths: rows of each row group, for the `chunked` sampler.
        num_classes: number of classes, where the target's are whole numbers.
        left_out: columns that hold an index of pandas or Dask.

    Raises:
        ValueError: a file is not a Parquet file, lacks a column, or has one that holds no numbers.
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: pyarrow is not installed.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        target: str | None = None,
        features: Sequence[str] | str | None = None,
        fill: float | None = None,
        cache_mb: float = 1024,
        **access: Any,
    ) -> None:
        if not files:
            raise ValueError("no files are given: type data.files=…, and data.val_files=… or data.val=null")
        self.traffic = TransferCounters()
        self.access = Access(setting="data.files", traffic=self.traffic, **access)
        self.target = None if target is None else str(target)
        self.fill, self.cache_mb = fill, cache_mb
        self._groups: list[tuple[PartFile, int, int]] = []  # file of each row group, its number there, its first row
        self.shard_lengths: list[int] = []
        named: str | list[Any] = as_text(files)
        urls = [named] if isinstance(named, str) else [*map(str, named)]
        found = open_files(self.access, urls)
        parts = [part for part in found if part.file.metadata.num_rows]
        if not parts:
            raise ValueError(f"{', '.join(map(bare_url, urls))} has no rows: check data.files=...")
        self.left_out: list[str] = []
        given = [features] if isinstance(features, str) else features
        self.features = [str(name) for name in given] if given else self._others(parts)
        if not self.features:
            raise ValueError(f"{parts[0].name} has no column but the target: type data.features=[...]")
        self._columns = wanted = [*self.features, *([self.target] if self.target is not None else [])]
        if twice := [name for name in dict.fromkeys(wanted) if wanted.count(name) > 1]:
            raise ValueError(f"{', '.join(twice)} is given twice: type data.target=... or data.features=[...]")
        for part in parts:
            self._check(part, wanted)
            self._take_up(part)
        self._ends = list(accumulate(self.shard_lengths))
        self.feature_widths = tuple(parquet_files.width_of(parts[0], column) for column in self.features)
        for part in parts[1:]:
            self._check_widths(part, parts[0].name)
        self._whole = self.target is not None and all(parquet_files.is_whole(part.types[self.target]) for part in parts)
        self._range: tuple[int, int] | None = None
        if self._whole:
            ranges = [parquet_files.range_of(str(self.target), part, group) for part, group, _ in self._groups]
            self._range = min(chain(*ranges), default=0), max(chain(*ranges), default=0)
        self.num_classes = self._range[1] + 1 if self._range is not None and self._range[1] >= 0 else None
        self._begin_process_state()

    def _set_process_state(self) -> None:
        self._cache: OrderedDict[int, tuple[np.ndarray, np.ndarray | None]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        return self._rows([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the rows. `collate` makes x, (n, features), and y, (n,), of them, and so does torch."""
        rows = self._rows(indices)
        return rows if isinstance(indices, Indices) else list(rows)  # torch's default_collate stacks lists only

    def _rows(self, indices: Sequence[int]) -> RowBatch:
        wanted = np.asarray(indices)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)  # from the end, as of a list
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"rows go from 0 to {len(self) - 1}")
        groups = np.searchsorted(self._ends, wanted, side="right")
        x = np.empty((len(wanted), sum(self.feature_widths)), np.float32)
        y = None if self.target is None else np.empty(len(wanted), np.int64 if self._whole else np.float32)
        for group in np.unique(groups):
            places = groups == group
            begin = self._ends[group] - self.shard_lengths[group]
            own_x, own_y = self._read(int(group))
            x[places] = own_x[wanted[places] - begin]
            if y is not None and own_y is not None:
                y[places] = own_y[wanted[places] - begin]
        return RowBatch(torch.from_numpy(x) if y is None else (torch.from_numpy(x), torch.from_numpy(y)))

    def collate(self, rows: Sequence[Any]) -> Any:
        """Make a batch of rows, without a copy if `__getitems__` has made it already."""
        return rows.batch if isinstance(rows, RowBatch) else torch.utils.data.default_collate(list(rows))

    def stats(self) -> dict[str, int]:
        """Return what was read so far."""
        return {name: getattr(self.traffic, name) for name in ("bytes", "requests", "retries")}

    def close(self) -> None:
        self.access.close()

    def described(self) -> str:
        """Return what the features and the target are, for the header of a run."""
        names = ", ".join(self.features[:8]) + (f" … ({len(self.features)})" if len(self.features) > 8 else "")
        text = names if self.target is None else f"{names} -> {self.target}"
        left = ", ".join(name or "a column without a name" for name in self.left_out)
        return f"{text}; left out: {left}, an index" if self.left_out else text

    def check_classes(self, num_classes: int | None, ignored: int | None = None) -> None:
        """Refuse targets that can't be class numbers.

        Args:
            num_classes: of the model; None: as many as this data set has.
            ignored: a number that the loss takes for no class.

        Raises:
            ConfigError: they are fractions, negative, or larger than allowed; or the first classes have no sample.
        """
        if self.target is None:
            return
        name = self.target
        named = f"the target {name} of {self._groups[0][0].name} holds"
        if self._range is None:
            kinds = " and ".join(sorted({str(part.types[name]) for part, _, _ in self._groups}))
            write = f"write df[{name!r}].astype('int64'), or predict numbers: task=regression model.num_classes=1"
            raise ConfigError(f"{named} {kinds}, and classes are whole numbers: {write}")
        smallest, largest = self._range
        found = f"{named} {smallest} {f'to {largest}' if smallest < largest else 'only'}"
        write = f"write the numbers of the classes from 0, as pd.factorize(df[{name!r}], sort=True)[0] gives them"
        give = f"give model.num_classes={largest + 1}, or {write}"
        if smallest < 0 and smallest != ignored:
            raise ConfigError(f"{found}, and classes are numbered from 0: {write}")
        if num_classes is None and smallest == largest:
            raise ConfigError(f"{found}: give model.num_classes=<n>, or {write}")
        if num_classes is None and smallest > 0:
            raise ConfigError(f"{found}, and classes are numbered from 0: {give}")
        if num_classes is not None and largest >= num_classes and largest != ignored:
            raise ConfigError(f"{found}, and the model has {num_classes} classes, 0 to {num_classes - 1}: {give}")

    # -- files -------------------------------------------------------------------------------------------------

    def _others(self, parts: Sequence[PartFile]) -> list[str]:
        found: list[list[str]] = []
        for part in parts:
            index = parquet_files.index_columns(part.file.schema_arrow) - {self.target}
            self.left_out += [name for name in part.types if name in index and name not in self.left_out]
            found.append([name for name in part.types if name not in index and name != self.target])
            if other := set(found[-1]) ^ set(found[0]):
                has, lacks = (part, parts[0]) if other & set(found[-1]) else (parts[0], part)
                raise ValueError(
                    f"{has.name} has the column {', '.join(sorted(other))}, and {lacks.name} has not: name the features"
                )
        return found[0]

    def _check(self, part: PartFile, wanted: Sequence[str]) -> None:
        if missing := [column for column in wanted if column not in part.types]:
            names = f"{', '.join(missing)}, only {', '.join(part.types)}"
            null = " (null: there is none, and rows are to be predicted)" if self.target in missing else ""
            raise ValueError(f"{part.name} has no column {names}: type data.target=...{null} or data.features=[...]")
        for column in wanted:
            if part.file.schema_arrow.names.count(column) > 1:
                raise ValueError(f"{part.name} has several columns {column}: write them with different names")
            kind, is_target = part.types[column], column == self.target
            inner = kind.value_type if parquet_files.is_vector(kind) and not is_target else kind
            if not parquet_files.is_number(inner):
                what = "the target" if is_target else "the column"
                others = "" if is_target else "name others with data.features=[...], or "
                advice = parquet_files.advice(kind).replace("df[c]", f"df[{column!r}]")
                raise ValueError(
                    f"{part.name}: {what} {column} holds no numbers ({kind}): {others}write them as numbers{advice}"
                )

    def _check_widths(self, part: PartFile, first: str) -> None:
        for column, width in zip(self.features, self.feature_widths, strict=True):
            own = parquet_files.known_width(part.types[column])
            if own not in (None, width):
                raise ValueError(
                    f"{part.name}: column {column} has {own} numbers in a row, and {width} in {first}: write one "
                    "length, or name others with data.features=[...]"
                )

    def _take_up(self, part: PartFile) -> None:
        row = 0
        for group in range(part.file.metadata.num_row_groups):
            length = part.file.metadata.row_group(group).num_rows
            if length:
                self._groups.append((part, group, row))
                self.shard_lengths.append(length)
            row += length

    def _read(self, group: int) -> tuple[np.ndarray, np.ndarray | None]:
        with self._lock:
            if group in self._cache:
                self._cache.move_to_end(group)
                return self._cache[group]
            part, number, first = self._groups[group]
            table = part.read(number, self._columns)
            features = (
                parquet_files.numbers(table.column(name), name, width, self.fill, part.name, first)
                for name, width in zip(self.features, self.feature_widths, strict=True)
            )
            x, y = np.concatenate([*features], axis=1), None
            if self.target is not None:
                values = table.column(self.target)
                y = parquet_files.targets(values, self.target, self._whole, part.name, first)
            self._cache[group] = x, y
            while len(self._cache) > 1 and self._cached_bytes() > self.cache_mb * 2**20:
                self._cache.popitem(last=False)
            return x, y

    def _cached_bytes(self) -> int:
        return sum(part.nbytes for parts in self._cache.values() for part in parts if part is not None)
