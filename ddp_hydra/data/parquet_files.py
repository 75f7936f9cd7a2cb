"""Finds and opens Parquet files: single ones, patterns, and folders as Spark, Hive, Dask and others leave them.

Makes numbers of their columns, or says in a sentence why it can't.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from fsspec.utils import glob_translate

from ddp_hydra.data.names import is_leftover
from ddp_hydra.errors import DataError
from ddp_hydra.storage import Access, Store, bare_url, is_remote
from ddp_hydra.storage.base import RangesIgnoredError
from ddp_hydra.storage.urls import local_path

with contextlib.suppress(ImportError):  # `open_files` says what to install
    import pyarrow.compute
    import pyarrow.parquet
    import pyarrow.types as kinds

SUFFIXES = (".parquet", ".pq", ".parq")
LAKES = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}
"""Folders by which tables are known whose files also hold rows that were deleted or replaced."""
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""The value that Hive writes for an empty cell."""


def is_damage(error: Exception) -> bool:
    # Tell pyarrow's error about a file from one of a store, a disk or the memory.
    is_arrows = isinstance(error, pyarrow.ArrowException) and not isinstance(error, MemoryError)
    return is_arrows or (type(error) is OSError and error.errno is None)


@dataclass
class PartFile:
    """A Parquet file; it can be pickled, and is opened when it is needed.

    `inside` is its path below the folder that was given. `partition`: column -> value, which the folders around the
    file give to all its rows: scalars of pyarrow.
    """

    name: str
    store: Store
    key: str
    size: int
    inside: str = ""
    partition: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def file(self) -> Any:
        return pyarrow.parquet.ParquetFile(io.BufferedReader(StoredFile(self.store, self.key, self.size), 1 << 16))

    @property
    def types(self) -> dict[str, Any]:
        schema = self.file.schema_arrow
        stored = dict(zip(schema.names, schema.types, strict=True))
        return stored | {name: value.type for name, value in self.partition.items() if name not in stored}

    def read(self, group: int, columns: Sequence[str]) -> Any:
        stored = [name for name in columns if name in self.file.schema_arrow.names]
        table = self._stored(group, stored)
        n_rows = self.file.metadata.row_group(group).num_rows
        for name in columns:
            if name not in stored:
                table = table.append_column(name, pyarrow.repeat(self.partition[name], n_rows))
        return table

    def _stored(self, group: int, columns: Sequence[str]) -> Any:
        try:
            return self.file.read_row_group(group, columns=columns)
        except Exception as error:
            if not is_damage(error):
                raise
            for column in columns if len(columns) > 1 else ():  # find the column, which the error does not name
                self._stored(group, [column])
            raise DataError(
                f"{self.name}: column {', '.join(columns)} of row group {group} can't be read "
                f"({' '.join(str(error).split()).rstrip('.')}): the file is damaged: copy or write it anew"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "file"}


def need_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise ModuleNotFoundError("Parquet needs pyarrow: type `pip install 'ddp-hydra[parquet]'`") from None


def open_files(access: Access, urls: Sequence[str]) -> list[PartFile]:
    need_pyarrow()
    opened: list[PartFile] = []
    for url in urls:
        found = _find(access, url)
        partitions = _typed([_folders_of(part.inside) for part in found])
        for part, partition in zip(found, partitions, strict=True):
            part.partition = partition
            try:
                part.file  # noqa: B018  opens it
            except Exception as error:
                if not is_damage(error):
                    raise
                raise ValueError(
                    f"{part.name} can't be read as a Parquet file ({error}): check data.files=..."
                ) from None
        opened += found
    return opened


def _find(access: Access, url: str) -> list[PartFile]:
    path = url.rstrip("/")
    if url.startswith(("http://", "https://")):
        return _of_web_server(access, url)
    if not is_remote(url):
        local = local_path(url)
        if local.is_dir():
            return _in_folder(access, path or "/")
        if local.is_file() and not url.endswith((".csv", ".csv.gz")):
            return [_file(access, path)]
    _refuse_csv(path)
    if wildcard := re.search(r"[*?[]", path):
        base, slash, _ = path[: wildcard.start()].rpartition("/")
        return _in_folder(access, base or slash or ".", path[len(base + slash) :])
    if path != url or not path.lower().endswith(SUFFIXES):
        return _in_folder(access, path)
    try:
        return [_file(access, path)]
    except (FileNotFoundError, IsADirectoryError):
        with contextlib.suppress(OSError, ValueError):
            return _in_folder(access, path)  # Spark and Dask call folders so
        raise _no_file(url) from None


def _of_web_server(access: Access, url: str) -> list[PartFile]:
    _refuse_csv(url)
    if not urlsplit(url).query and not url.lower().endswith(SUFFIXES):
        return _in_folder(access, url)  # which says that there is no listing
    try:
        return [_file(access, url)]
    except FileNotFoundError:
        raise _no_file(url) from None


def _no_file(url: str) -> FileNotFoundError:
    return FileNotFoundError(f"there is no file {bare_url(url)}: check data.files and data.val_files")


def _refuse_csv(url: str) -> None:
    if bare_url(url).endswith((".csv", ".csv.gz")):
        raise ValueError(f"{bare_url(url)} is not a Parquet file: type {_conversion(bare_url(url))}")


def _conversion(url: str) -> str:
    name = PurePosixPath(url.removesuffix(".gz")).with_suffix(".parquet").name
    options = ""
    with contextlib.suppress(OSError, UnicodeDecodeError), Path(url).open(encoding="utf-8-sig") as file:
        first = "" if url.endswith(".gz") else file.readline()
        if ";" in first and "," not in first:  # Excel, where numbers have a decimal comma
            options = ", parse_options=csv.ParseOptions(delimiter=';')"
            options += ", convert_options=csv.ConvertOptions(decimal_point=',')"
        elif "\t" in first and "," not in first:
            options = ", parse_options=csv.ParseOptions(delimiter='\\t')"
    convert = f"parquet.write_table(csv.read_csv({bare_url(url)!r}{options}), {name!r})"
    return f'python -c "from pyarrow import csv, parquet; {convert}", and give {name} in its place'


def _file(access: Access, url: str) -> PartFile:
    store, key = access.open(url)
    return PartFile(bare_url(url), store, key, store.size(key))


def _in_folder(access: Access, url: str, pattern: str | None = None) -> list[PartFile]:
    store, prefix = access.open_folder(url)
    wanted = None if pattern is None else re.compile(glob_translate(pattern))
    found = []
    for key, size in sorted(store.objects(prefix)):
        inside = key[len(prefix) :].lstrip("/") if prefix else key
        if prefix and not key.startswith(f"{prefix}/"):
            continue
        for folder in inside.split("/")[:-1]:
            if folder in LAKES:
                raise ValueError(
                    f"{bare_url(url)} is a table of {LAKES[folder]}, whose files also hold rows that were deleted"
                )
        if not inside.lower().endswith(SUFFIXES) or _is_left(inside):
            continue
        around = (inside[: cut.start()] for cut in re.finditer("/|$", inside))  # a folder may match, too
        if wanted is None or any(map(wanted.match, around)):
            found.append(PartFile(f"{bare_url(url).rstrip('/')}/{inside}", store, key, size, inside))
    if not found:
        where = bare_url(url) if pattern is None else f"no file matches {bare_url(url)}/{pattern}: it"
        raise FileNotFoundError(f"{where} holds no file that ends with .parquet or .pq: check data.files=...")
    return found


def _is_left(inside: str) -> bool:
    # Return whether a file is no part of the data: hidden, or with an underscore in front as Spark's own files.
    own = any(part.startswith("_") and "=" not in part for part in inside.split("/"))
    return own or is_leftover(inside)


def _folders_of(inside: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in inside.split("/")[:-1]:
        name, is_value, value = folder.partition("=")
        if is_value and name:
            found[unquote(name)] = None if value == NO_VALUE else unquote(value)
    return found


def _typed(files: Sequence[Mapping[str, str | None]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for file in files for name in file)
    columns = {name: _inferred(pyarrow.array([file.get(name) for file in files], pyarrow.string())) for name in names}
    return [{name: columns[name][number] for name in file} for number, file in enumerate(files)]


def _inferred(values: Any) -> Any:
    for kind in (pyarrow.int64(), pyarrow.float64(), pyarrow.bool_()):
        with contextlib.suppress(pyarrow.ArrowInvalid):
            return values.cast(kind)
    return values


class StoredFile(io.RawIOBase):
    """A file in a store, read by ranges; of a store without ranges, a copy is made on the disk."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        super().__init__()
        self.copy: Any = None
        self.store, self.key, self.length, self.place = store, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.length}[whence]
        return self.place

    def readinto(self, buffer: Any) -> int:
        end = min(self.place + len(buffer), self.length)
        if end <= self.place:
            return 0
        content = self._content(end)
        buffer[: len(content)] = content
        self.place += len(content)
        return len(content)

    def close(self) -> None:
        if self.copy is not None:
            self.copy.close()
        super().close()

    def _content(self, end: int) -> memoryview:
        if self.copy is None:
            try:
                return memoryview(self.store.get_range(self.key, self.place, end)).cast("B")
            except RangesIgnoredError:
                whole = self.store.get(self.key, self.length)
                self.copy = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
                self.copy.write(whole)
                self.copy.flush()
        return memoryview(os.pread(self.copy.fileno(), end - self.place, self.place))  # a fork has the same position


_LARGEST = 2**63 - 1
_INDEX = re.compile(r"__index_level_\d+__|__null_dask_index__|Unnamed: 0|")
"""Names of an index; a column without a name is the index in a CSV file by pandas or R."""


def index_columns(schema: Any) -> set[str]:
    # Return the columns of a pyarrow schema that hold the index of pandas or Dask: they number or name the rows.
    stored = (schema.pandas_metadata or {}).get("index_columns", [])
    named = {name for name in stored if isinstance(name, str)}  # a dict is an index that has no column
    return named | {name for name in schema.names if _INDEX.fullmatch(name)}


def width_of(file: PartFile, column: str) -> int:
    if (known := known_width(file.types[column])) is not None:
        return known
    for group in range(file.file.metadata.num_row_groups):
        lengths = pyarrow.compute.list_value_length(file.read(group, [column]).column(column))
        if width := next((length.as_py() for length in lengths if length.as_py()), 0):
            return int(width)
    raise DataError(f"{file.name}: column {column} is empty in all rows: name others with data.features=[...]")


def known_width(kind: Any) -> int | None:
    # Return how many numbers a cell has, as far as the type says it.
    if kinds.is_fixed_size_list(kind):
        return int(kind.list_size)
    return None if is_vector(kind) else 1


def is_vector(kind: Any) -> bool:
    return kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)


def plain_type(kind: Any) -> Any:
    return kind.value_type if kinds.is_dictionary(kind) else kind


def is_whole(kind: Any) -> bool:
    return kinds.is_integer(plain_type(kind)) or kinds.is_boolean(plain_type(kind))


def is_number(kind: Any) -> bool:
    return is_whole(kind) or kinds.is_floating(plain_type(kind)) or kinds.is_decimal(plain_type(kind))


def advice(kind: Any) -> str:
    if kinds.is_temporal(kind):
        return ", such as seconds: (df[c] - df[c].min()).dt.total_seconds()"
    is_text = kinds.is_string(plain_type(kind)) or kinds.is_large_string(plain_type(kind))
    codes = "df[c].astype(pd.CategoricalDtype([...])).cat.codes, with the same list for all files"
    return f", such as {codes}" if is_text else ""


def numbers(column: Any, name: str, width: int, fill: float | None, where: str, first_row: int) -> np.ndarray:
    # Return a column as features, (rows, width) float32.
    # fill: replaces missing ones; None: they are an error.
    column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if is_vector(column.type):
        column = _flat(column, name, width, where, first_row)
    values = _floats(column, name, where, first_row, width)
    if fill is not None:
        values = np.nan_to_num(values, nan=fill, posinf=np.inf, neginf=-np.inf)
    elif (missing := np.isnan(values)).any():
        row = first_row + int(missing.argmax()) // width
        raise DataError(
            f"{where}: column {name} has {int(missing.sum())} empty cells or NaN, the first in row {row}: give "
            "data.fill=0, or leave the column out with data.features=[...]"
        )
    return values.reshape(-1, width)


def _flat(column: Any, name: str, width: int, where: str, first_row: int) -> Any:
    lengths = np.asarray(pyarrow.compute.list_value_length(column).fill_null(-1).to_numpy(zero_copy_only=False))
    if (odd := lengths != width).any():
        at = int(odd.argmax())
        found = "is empty" if lengths[at] < 0 else f"has {lengths[at]} numbers"
        raise DataError(
            f"{where}: column {name} {found} in row {first_row + at}, and {width} in others: write one length"
        )
    return column.flatten()


def _floats(column: Any, name: str, where: str, first_row: int, width: int = 1) -> np.ndarray:
    column = _plain(column)
    if not kinds.is_floating(column.type):
        if kinds.is_boolean(column.type):
            column = column.cast(pyarrow.uint8())
        column = column.cast(pyarrow.float64(), safe=False)
    values = np.asarray(column.to_numpy(zero_copy_only=False))
    with np.errstate(over="ignore"):
        floats = values.astype(np.float32, copy=False)
    if values.itemsize > 4 and (large := np.isinf(floats) & np.isfinite(values)).any():
        place = int(large.argmax())
        raise DataError(
            f"{where}: column {name} has {values[place]:g} in row {first_row + place // width}, and the largest number "
            f"of float32 is {np.finfo(np.float32).max:.2g}: scale it, as df[{name!r}] / df[{name!r}].abs().max() does"
        )
    return floats


def _plain(column: Any) -> Any:
    return column.dictionary_decode() if kinds.is_dictionary(column.type) else column


def targets(column: Any, name: str, whole: bool, where: str, first_row: int) -> np.ndarray:
    # Return a column as targets, (rows,): int64 for whole numbers, else float32.
    column = _plain(column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))
    empty = np.asarray(column.is_null(nan_is_null=True).to_numpy(zero_copy_only=False))
    if empty.any():
        raise DataError(
            f"{where}: the target {name} has {int(empty.sum())} empty cells or NaN, the first in row "
            f"{first_row + int(empty.argmax())}: write the file without these rows, by df.dropna(subset=[{name!r}])"
        )
    if not whole:
        return _floats(column, name, where, first_row)
    return np.asarray(column.cast(pyarrow.int64(), safe=False).to_numpy(zero_copy_only=False))


def range_of(column: str, part: PartFile, group: int) -> list[int]:
    # Return the smallest and the largest number in a row group, which is read if it has no statistics; [] for none.
    chunks = part.file.metadata.row_group(group)
    # The field y of a struct a has the path of a column a.y, and the name y.
    names = [part.file.schema.column(place).name for place in range(chunks.num_columns)]
    stored = map(chunks.column, [place for place, name in enumerate(names) if name == column])
    known = next((one.statistics for one in stored if one.path_in_schema == column), None)
    if known is not None and known.has_min_max:
        found = [int(known.min), int(known.max)]
    else:
        both = pyarrow.compute.min_max(_plain(part.read(group, [column]).column(column).combine_chunks()))
        found = [int(value) for value in both.as_py().values() if value is not None]
    if found and found[1] > _LARGEST:
        raise ValueError(f"{part.name}: the target {column} has {found[1]}, and the largest one is {_LARGEST} (int64)")
    return found
