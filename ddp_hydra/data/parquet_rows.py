"""Rows of Parquet files: some columns are the features, one is the target."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from ddp_hydra.storage import Access, Store, shown
from ddp_hydra.storage.base import TransferCounters

SUFFIXES = (".parquet", ".pq")


class ParquetRows:
    """Gives (x, y): the features of a row, (features,) float32, and its target, float32, or int64 for whole numbers.

    The row groups of the files are read when their rows are asked for, and kept in memory. If they do not all fit, take
    sampler=chunked: it reads a few row groups at a time.

    Args:
        files: URL or path of a Parquet file or of a folder of them, or several.
        target: column of the target; None: the samples are x alone.
        features: columns of the features; None: all the others.
        fill: replaces missing features; None: they are an error.
        cache_mb: memory for row groups, MiB per rank; one is kept in any case.
        access: arguments of `storage.Access`: endpoint_url, region, anon, client and more.

    Attributes:
        shard_lengths: rows of each row group, for the `chunked` sampler.
        num_classes: number of classes, where the target's are whole numbers and the files say the largest.

    Raises:
        ValueError: a file is not a Parquet file, lacks a column, or has one that holds no numbers.
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: pyarrow is not installed.
    """

    thread_safe = True

    def __init__(
        self,
        files: str | Sequence[str] | None,
        target: str | None = None,
        features: Sequence[str] | None = None,
        fill: float | None = None,
        cache_mb: float = 1024,
        **access: Any,
    ) -> None:
        if not files:
            raise ValueError("no files are given: type data.files=…, and data.val_files=… or data.val=null")
        self.traffic = TransferCounters()
        self.access = Access(setting="data.files", traffic=self.traffic, **access)
        self.target, self.fill, self.cache_mb = target, fill, cache_mb
        self._groups: list[tuple[Any, int]] = []  # the file of each row group, and its number there
        self.shard_lengths: list[int] = []
        largest: list[Any] = []
        self.features = list(features or ())
        urls = [files] if isinstance(files, str) else files
        for url in urls:
            for name, file in self._open(url):
                self._take_up(name, file, largest)
        if not self._groups:
            raise ValueError(f"{', '.join(map(shown, urls))} has no rows: check data.files=...")
        self._ends = list(accumulate(self.shard_lengths))
        self.num_classes = None if None in largest or not largest else int(max(largest)) + 1
        self._cache: OrderedDict[int, tuple[np.ndarray, np.ndarray | None]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        batch = self.__getitems__([index])
        return tuple(part[0] for part in batch) if isinstance(batch, tuple) else batch[0]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return the rows as a batch: x, (n, features), and y, (n,)."""
        wanted = np.asarray(indices)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"rows go from 0 to {len(self) - 1}")
        groups = np.searchsorted(self._ends, wanted, side="right")
        x = np.empty((len(wanted), len(self.features)), np.float32)
        y = None
        for group in np.unique(groups):
            places = groups == group
            begin = self._ends[group] - self.shard_lengths[group]
            own_x, own_y = self._read(int(group))
            x[places] = own_x[wanted[places] - begin]
            if own_y is not None:
                y = np.empty(len(wanted), own_y.dtype) if y is None else y
                y[places] = own_y[wanted[places] - begin]
        return torch.from_numpy(x) if y is None else (torch.from_numpy(x), torch.from_numpy(y))

    def collate(self, batch: Any) -> Any:
        """Return the batch that `__getitems__` has made, or one of single samples."""
        if not isinstance(batch, list):
            return batch
        return torch.utils.data.default_collate(batch)

    def stats(self) -> dict[str, int]:
        """Return what was read so far."""
        return {name: int(self.traffic.total(name)) for name in ("bytes", "requests", "retries")}

    def close(self) -> None:
        """End all waiting for retries."""
        self.access.close()

    # -- files -------------------------------------------------------------------------------------------------

    def _open(self, url: str) -> list[tuple[str, Any]]:
        """Return the Parquet files of a URL, with their names."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise ModuleNotFoundError("Parquet needs pyarrow: type `pip install 'ddp-hydra[parquet]'`") from None
        if url.endswith(SUFFIXES):
            store, key = self.access.open(url)
            found = [(shown(url), store, key, store.size(key))]
        elif url.endswith(".csv"):
            name = PurePosixPath(url).with_suffix(".parquet").name
            convert = f"from pyarrow import csv, parquet; parquet.write_table(csv.read_csv({shown(url)!r}), {name!r})"
            raise ValueError(f'{shown(url)} is not a Parquet file: type python -c "{convert}", and data.files={name}')
        else:
            store, prefix = self.access.open_folder(url)
            listed = sorted((key, size) for key, size in store.objects(prefix) if key.endswith(SUFFIXES))
            found = [(key, store, key, size) for key, size in listed]
            if not found:
                where = shown(url)
                raise FileNotFoundError(f"{where} holds no file that ends with .parquet or .pq: check data.files=...")
        opened = []
        for name, store, key, size in found:
            try:
                source = io.BufferedReader(StoredFile(store, key, size), 1 << 16)
                opened.append((name, pyarrow.parquet.ParquetFile(source)))
            except pyarrow.ArrowException as error:
                raise ValueError(f"{name} is not a Parquet file ({error}): check data.files=...") from None
        return opened

    def _take_up(self, name: str, file: Any, largest: list[Any]) -> None:
        """Take up the row groups of a file.

        Args:
            name: of the file, for messages.
            file: the opened file.
            largest: gets the largest class number of each row group; None if the file does not say it.
        """
        import pyarrow

        columns = {field.name: field.type for field in file.schema_arrow}
        if not self.features:
            self.features = [column for column in columns if column != self.target]
        wanted = [*self.features, *([self.target] if self.target is not None else [])]
        if missing := [column for column in wanted if column not in columns]:
            raise ValueError(
                f"{name} has no column {', '.join(missing)}, only {', '.join(columns)}: type data.target=... or "
                "data.features=[...]"
            )
        kinds = pyarrow.types
        is_number = [kinds.is_integer, kinds.is_floating, kinds.is_boolean]
        if texts := [column for column in wanted if not any(check(columns[column]) for check in is_number)]:
            raise ValueError(
                f"{name}: the columns {', '.join(texts)} hold no numbers ({columns[texts[0]]}): name others with "
                "data.features=[...], or write them as numbers"
            )
        for group in range(file.metadata.num_row_groups):
            of_group = file.metadata.row_group(group)
            if not of_group.num_rows:
                continue
            self._groups.append((file, group))
            self.shard_lengths.append(of_group.num_rows)
            if self.target is not None and kinds.is_integer(columns[self.target]):
                stored = map(of_group.column, range(of_group.num_columns))  # a struct has several
                known = next(column.statistics for column in stored if column.path_in_schema == self.target)
                largest.append(known.max if known is not None and known.has_min_max else None)

    def _read(self, group: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a row group: its features, (rows, features), and its targets, (rows,)."""
        with self._lock:
            if group in self._cache:
                self._cache.move_to_end(group)
                return self._cache[group]
            file, number = self._groups[group]
            columns = [*self.features, *([self.target] if self.target is not None else [])]
            table = file.read_row_group(number, columns=columns)
            x = np.stack([self._feature(table, column) for column in self.features], axis=1)
            y = self._target(table.column(self.target)) if self.target is not None else None
            self._cache[group] = x, y
            while len(self._cache) > 1 and sum(map(n_bytes, self._cache.values())) > self.cache_mb * 2**20:
                self._cache.popitem(last=False)
            return x, y

    def _feature(self, table: Any, name: str) -> np.ndarray:
        column = table.column(name)
        if column.null_count and self.fill is None:
            raise ValueError(f"column {name} has {column.null_count} empty cells in a row group: give data.fill=0")
        values = np.asarray(column.to_numpy(), np.float32)
        return values if self.fill is None else np.nan_to_num(values, nan=self.fill, posinf=np.inf, neginf=-np.inf)

    def _target(self, column: Any) -> np.ndarray:
        if column.null_count:
            raise ValueError(f"the target {self.target} has {column.null_count} empty cells in a row group")
        values = column.to_numpy()
        return values.astype(np.float32 if values.dtype.kind == "f" else np.int64)


def n_bytes(parts: tuple[np.ndarray, np.ndarray | None]) -> int:
    """Return the memory that arrays take."""
    return sum(part.nbytes for part in parts if part is not None)


class StoredFile(io.RawIOBase):
    """A file in a store, read by ranges.

    Args:
        store: where it is.
        key: its name there.
        size: bytes.
    """

    def __init__(self, store: Store, key: str, size: int) -> None:
        super().__init__()
        self.store, self.key, self.length, self.place = store, key, size, 0

    def readable(self) -> bool:
        """Return whether it can be read."""
        return True

    def seekable(self) -> bool:
        """Return whether the position can be moved."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position, and return it."""
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.length}[whence]
        return self.place

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the position on, and return how many bytes were read."""
        end = min(self.place + len(buffer), self.length)
        if end <= self.place:
            return 0
        content = memoryview(self.store.get_range(self.key, self.place, end)).cast("B")
        buffer[: len(content)] = content
        self.place += len(content)
        return len(content)
