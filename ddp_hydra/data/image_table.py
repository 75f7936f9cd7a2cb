"""Labelled images that a CSV or Parquet table lists."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from ddp_hydra.data.images.dataset import StoredImages
from ddp_hydra.data.images.listing import StringArray
from ddp_hydra.data.parquet_files import SUFFIXES, need_pyarrow
from ddp_hydra.storage import Access, LocalFolder, Store, bare_url, is_remote
from ddp_hydra.storage.urls import as_text, local_path


class ImageTable(StoredImages):
    """Labelled images; each row of a table holds the path and the label of one image.

    Samples have the order of the rows, so the `sharded` sampler gives each rank a contiguous part of the table.

    Args:
        table: CSV (its first row names the columns; may be .gz) or Parquet: s3://bucket/key, http(s)://..., or a path.
        root: the URL or folder of relative paths; None: the table's own folder.
        path_column: name of the column with paths below `root`, absolute paths, or s3://, http(s):// and file:// URLs.
            Where the table or `root` is in a store, only files below a local `root` are read from this machine.
        label_column: name of the column with labels; numbers are sorted as numbers. None: there are none, and the
            images are to be predicted.
        classes_from: a table whose labels are the classes; None: the labels of `table`. For a validation set, give the
            table of the training set, so that both use the same class numbers.
        images: arguments of `StoredImages` (endpoint_url, region, anon and more) and of `ImageDataset` (transform,
            threads, cache_mb, max_bad_fraction and more).

    Raises:
        ValueError: an argument is out of its range, the table lacks such columns or has no rows, or a path leads out of
            a store.
        FileNotFoundError: there is no such table.
        PermissionError: it may not be read.
        ConnectionError: the store is not reachable.
        ModuleNotFoundError: Parquet needs pyarrow.
    """

    thread_safe = True
    setting = "data.table"

    def __init__(
        self,
        table: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        path_column: str = "path",
        label_column: str | None = "label",
        *,
        classes_from: str | os.PathLike[str] | None = None,
        **images: Any,
    ) -> None:
        super().__init__(**images)
        self.table: str = as_text(table)
        self.labelled = label_column is not None
        columns = {"path_column": path_column}
        if label_column is not None:
            columns["label_column"] = label_column
        paths, *rest = read_columns(self.access, self.table, columns)
        self._paths = StringArray(paths)
        self._root: str = _folder_of(self.table) if root is None else as_text(root) or "."
        self._is_stored = is_remote(self.table) or is_remote(self._root)
        self._root_store, self._prefix = self.access.open_folder(self._root)
        self._check_paths(paths)
        if label_column is None:
            self.classes, self.targets = [], np.full(len(paths), -1, np.int32)
            return
        (labels,) = rest
        named = labels
        if classes_from is not None:
            (named,) = read_columns(self.access, as_text(classes_from), {"label_column": label_column})
        origin = bare_url(as_text(classes_from) or self.table)
        _check_labels(named, origin, label_column)
        self.classes = sorted(set(named), key=_numbers_by_value)
        if unknown := sorted(set(labels) - set(self.classes)):
            raise ValueError(
                f"{self.where()} has labels that {origin} lacks: {', '.join(unknown[:10])}; check data.table=..."
            )
        self.targets = np.fromiter((self.class_to_idx[label] for label in labels), np.int32, len(labels))

    def _check_paths(self, paths: Sequence[str]) -> None:
        for row, path in enumerate(paths, start=1):
            if "\\" in path:
                wrong = f"has a path of Windows, {path}: write paths with slashes"
            elif self._is_stored and not is_remote(path) and _key(self._prefix, path).startswith("../"):
                begin = f"paths begin at {bare_url(self._root)}"
                wrong = f"names {path}, and {begin}: write a path that does not lead out of the store"
            elif self._is_stored and path.startswith("file:"):
                begin = f"paths begin at {bare_url(self._root)}"
                wrong = f"names {path}, a file of this machine, and {begin}: write a path below it"
            else:
                continue
            raise ValueError(f"{self.where()}: row {row} {wrong}")

    def where(self) -> str:
        return bare_url(self.table)

    def advice_on_missing(self) -> str:
        where = bare_url(self._root)
        return f"Relative paths of the table begin at {where}: give another folder with data.root=<folder>. "

    def name(self, index: int) -> str:
        return bare_url(self._paths[index])

    def sample_id(self, index: int) -> str:
        return self._paths[index]

    def fetch(self, index: int) -> Any:
        store, key = self._find(self._paths[index])
        return store.get(key)

    def _find(self, path: str) -> tuple[Store, str]:
        # A table in a store names no files of this machine: a slash at the beginning is its own way to write a key.
        is_absolute = path.startswith("/") and not self._is_stored and Path(path).exists()
        if is_remote(path) or path.startswith("file:") or is_absolute:
            return self.access.open(path)
        if ".." in path.split("/") and not self._is_stored and isinstance(self._root_store, LocalFolder):
            return self.access.open(str(self._root_store.folder.joinpath(self._prefix, path.lstrip("/")).resolve()))
        return self._root_store, _key(self._prefix, path)


def read_columns(access: Access, table: str, columns: Mapping[str, str]) -> list[list[str]]:
    # columns: key of `data` -> name of the column.
    store, key = access.open(table)
    content = store.get(key)
    read = _read_parquet if key.endswith(SUFFIXES) else _read_csv
    found = read(content, table, columns)
    if not found[0]:
        raise ValueError(f"{bare_url(table)} has no rows: check data.table=...")
    for column, values in zip(columns.values(), found, strict=True):
        if "" in values:
            raise ValueError(
                f"{bare_url(table)}: the column {column} has {values.count('')} empty cells, the first in row "
                f"{values.index('') + 1} below the names of the columns: fill them, or leave these rows out"
            )
    return found


def _check_labels(labels: Sequence[str], table: str, column: str) -> None:
    known: dict[Decimal, str] = {}
    for label in dict.fromkeys(labels):
        if (number := _number(label)) is not None and (same := known.setdefault(number, label)) != label:
            raise ValueError(
                f"{table}: the column {column} has {same} and {label}, which are one number: write it in one way"
            )


def _number(label: str) -> Decimal | None:
    try:
        number = Decimal(label)  # a float would take two long numbers for one
    except InvalidOperation:
        return None
    # An id such as 123e4567 is a word, and so is 1_2, which Python reads as 12.
    return number if number.is_finite() and math.isfinite(float(number)) and "_" not in label else None


def _key(prefix: str, path: str) -> str:
    key = f"{prefix.rstrip('/')}/{path.lstrip('/')}".lstrip("/")
    return posixpath.normpath(key) if ".." in key.split("/") else key


def _read_csv(content: Any, table: str, columns: Mapping[str, str]) -> list[list[str]]:
    csv.field_size_limit(2**31 - 1)  # of this process: a table may hold polygons or captions, too
    try:
        text = (gzip.decompress(content) if bare_url(table).endswith(".gz") else bytes(content)).decode("utf-8-sig")
        file = io.StringIO(text, newline="")
        before, header, rows = _header(file, columns.values())
        places = [_place(key, column, header) for key, column in columns.items()]
        found: list[list[str]] = [[] for _ in columns]
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise ValueError(
                    f"line {before + rows.line_num} has {len(row)} fields, and the names of the columns {len(header)}"
                )
            for column, place in zip(found, places, strict=True):
                column.append(row[place])
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{bare_url(table)} is not a CSV file in UTF-8 ({error}): check data.table=...") from None
    except ValueError as error:
        raise ValueError(f"{bare_url(table)}: {error}: check data.table=...") from None
    return found


def _header(file: io.StringIO, columns: Iterable[str]) -> tuple[int, list[str], Any]:
    # Excel separates fields by semicolons in many countries, and may say so in a line of its own, `sep=;`. Lines
    # before the names that begin with # are comments.
    before, start, first = 0, 0, file.readline()
    while re.match("(sep=.|#)", first, re.IGNORECASE) and not set(columns) <= set(next(csv.reader([first]))):
        before, start, first = before + 1, file.tell(), file.readline()
    for separator in (",", ";", "\t", ","):  # without a separator that fits, the columns are those between commas
        file.seek(start)
        rows = csv.reader(file, delimiter=separator, strict=True)
        if set(columns) <= set(header := next(rows, [])):
            break
    return before, header, rows


def _read_parquet(content: Any, table: str, columns: Mapping[str, str]) -> list[list[str]]:
    need_pyarrow()
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(bytes(content)))
        for key, column in columns.items():
            _place(key, column, file.schema_arrow.names)
        read = file.read(columns=list(columns.values()))
    except (pyarrow.ArrowException, OSError) as error:  # a damaged page
        raise ValueError(f"{bare_url(table)} is not a Parquet file ({error}): check data.table=...") from None
    except ValueError as error:
        raise ValueError(f"{bare_url(table)}: {error}: check data.table=...") from None
    return [[_text(value) for value in read.column(column).to_pylist()] for column in columns.values()]


def _text(value: Any) -> str:
    # Return a cell of a Parquet file as text; "" for an empty one, which pandas stores as NaN among numbers.
    if value is None or value != value:
        return ""
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)


def _place(key: str, column: str, header: Sequence[str]) -> int:
    if column not in header:
        raise ValueError(f"there is no column {column!r}, only {', '.join(header) or 'none'}: type data.{key}=...")
    if list(header).count(column) > 1:
        raise ValueError(f"there are several columns {column!r}: give them different names")
    return list(header).index(column)


def _numbers_by_value(label: str) -> tuple[bool, Decimal, str]:
    number = _number(label)
    return number is None, number or Decimal(), label


def _folder_of(url: str) -> str:
    if url.startswith("file:"):
        return str(local_path(url).parent)
    if url.startswith(("http://", "https://")):
        url = url.partition("?")[0].partition("#")[0]
    return url.rpartition("/")[0] or ("/" if url.startswith("/") else ".")
