"""Makes numbers of the columns of Parquet files, or says in a sentence why it can't."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp_hydra.data.parquet_files import PartFile
from ddp_hydra.errors import DataError

with contextlib.suppress(ImportError):  # `open_files` says what to install
    import pyarrow.compute
    import pyarrow.types as kinds

_LARGEST = 2**63 - 1
_INDEX = re.compile(r"__index_level_\d+__|__null_dask_index__|Unnamed: 0|")
"""Names of an index; a column without a name is the index in a CSV file by pandas or R."""


def index_columns(schema: Any) -> set[str]:
    # Return the columns of a pyarrow schema that hold the index of pandas or Dask: they number or name the rows.
    stored = (schema.pandas_metadata or {}).get("index_columns", [])
    named = {name for name in stored if isinstance(name, str)}  # a dict is an index that has no column
    return named | {name for name in schema.names if _INDEX.fullmatch(name)}


def width_of(file: PartFile, column: str) -> int:
    kind = file.types[column]
    if not is_vector(kind):
        return 1
    if kinds.is_fixed_size_list(kind):
        return int(kind.list_size)
    for group in range(file.file.metadata.num_row_groups):
        values = file.read(group, [column]).column(column).drop_null()
        if len(values):
            return len(values[0])
    return 1


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


def range_of(file: PartFile, column: str, groups: Sequence[int]) -> list[int]:
    # Row groups without statistics are read.
    found: list[int] = []
    for group in groups:
        chunks = file.file.metadata.row_group(group)
        stored = map(chunks.column, range(chunks.num_columns))  # a struct has several
        known = next((one.statistics for one in stored if one.path_in_schema == column), None)
        if known is not None and known.has_min_max:
            found += [int(known.min), int(known.max)]
        else:
            both = pyarrow.compute.min_max(_plain(file.read(group, [column]).column(column).combine_chunks()))
            found += [int(value) for value in both.as_py().values() if value is not None]
    if found and max(found) > _LARGEST:
        raise ValueError(
            f"{file.name}: the target {column} has {max(found)}, and the largest one is {_LARGEST} (int64)"
        )
    return found
