"""Makes numbers of the columns of Parquet files, or says in a sentence why it can't."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp_hydra.data.parquet_files import PartFile
from ddp_hydra.errors import DataError

_INDEX = re.compile(r"__index_level_\d+__|__null_dask_index__|Unnamed: 0|")
"""Names of an index; a column without a name is the index in a CSV file by pandas or R."""


def index_columns(schema: Any) -> set[str]:
    # Return the columns of a pyarrow schema that hold the index of pandas or Dask: they number or name the rows.
    stored = (schema.pandas_metadata or {}).get("index_columns", [])
    named = {name for name in stored if isinstance(name, str)}  # a dict is an index that has no column
    return named | {name for name in schema.names if _INDEX.fullmatch(name)}


def width_of(file: PartFile, column: str, kind: Any) -> int:
    import pyarrow

    if pyarrow.types.is_fixed_size_list(kind):
        return int(kind.list_size)
    if not is_vector(kind):
        return 1
    for group in range(file.file.metadata.num_row_groups):
        values = file.file.read_row_group(group, columns=[column]).column(column).drop_null()
        if len(values):
            return len(values[0])
    return 1


def is_vector(kind: Any) -> bool:
    import pyarrow

    tests = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    return any(test(kind) for test in tests)


def plain_type(kind: Any) -> Any:
    import pyarrow

    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


def is_number(kind: Any) -> bool:
    import pyarrow

    kinds = pyarrow.types
    kind = plain_type(kind)
    return any(test(kind) for test in (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_decimal))


def is_whole(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_integer(plain_type(kind)) or pyarrow.types.is_boolean(plain_type(kind))


def advice(kind: Any) -> str:
    import pyarrow

    kinds = pyarrow.types
    if kinds.is_temporal(kind):
        return "write them as numbers, such as seconds: (df[c] - df[c].min()).dt.total_seconds()"
    if kinds.is_string(plain_type(kind)) or kinds.is_large_string(plain_type(kind)):
        return "write them as numbers, such as df[c].astype('category').cat.codes"
    return "write them as numbers"


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
    import pyarrow.compute

    lengths = np.asarray(pyarrow.compute.list_value_length(column).fill_null(-1).to_numpy(zero_copy_only=False))
    if (odd := lengths != width).any():
        at = int(odd.argmax())
        found = "is empty" if lengths[at] < 0 else f"has {lengths[at]} numbers"
        raise DataError(
            f"{where}: column {name} {found} in row {first_row + at}, and {width} in others: write vectors of one "
            "length, or leave the column out with data.features=[...]"
        )
    return column.flatten()


def _floats(column: Any, name: str, where: str, first_row: int, width: int = 1) -> np.ndarray:
    import pyarrow

    column = _plain(column)
    if not pyarrow.types.is_floating(column.type):
        if pyarrow.types.is_boolean(column.type):
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
    import pyarrow

    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column


def targets(column: Any, name: str, whole: bool, where: str, first_row: int) -> np.ndarray:
    # Return a column as targets, (rows,): int64 for whole numbers, else float32.
    import pyarrow

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


def range_of(file: PartFile, column: str, groups: Sequence[int]) -> tuple[int, int]:
    # Row groups without statistics are read.
    import pyarrow.compute

    found: list[int] = []
    for group in groups:
        of_group = file.file.metadata.row_group(group)
        stored = map(of_group.column, range(of_group.num_columns))  # a struct has several
        known = next(one for one in stored if one.path_in_schema == column)
        if known.statistics is not None and known.statistics.has_min_max:
            found += [int(known.statistics.min), int(known.statistics.max)]
            continue
        values = _plain(file.file.read_row_group(group, columns=[column]).column(column).combine_chunks())
        both = pyarrow.compute.min_max(values).as_py()
        found += [int(value) for value in both.values() if value is not None]
    return (min(found), max(found)) if found else (0, 0)
