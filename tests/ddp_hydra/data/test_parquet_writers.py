"""Parquet as other tools write it: each file is read right, or refused in a sentence that names file and column."""

from __future__ import annotations

import datetime
import decimal
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from ddp_hydra.data import ParquetRows
from ddp_hydra.errors import ConfigError, DataError

WRITTEN = Path(__file__).parents[2] / "data" / "tables"
"""Made by the tools themselves, see make.py there."""
FILES = sorted(path.name for path in WRITTEN.iterdir() if path.suffix != ".py" and not path.name.startswith("_"))
ROWS = sorted((n + 0.5, 10.0 * n, float(n % 2), n % 3) for n in range(8))


def rows(data: ParquetRows) -> list[tuple[float, ...]]:
    x, y = data.collate(data.__getitems__(range(len(data))))
    return sorted((*row, target) for row, target in zip(x.tolist(), y.tolist(), strict=True))


def write(path: Path, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.table(columns), path)
    return str(path)


@pytest.mark.parametrize("name", FILES)
def test_rows_of_each_writer(name):
    data = ParquetRows(str(WRITTEN / name), "y")
    assert rows(data) == ROWS
    assert data.num_classes == 3
    assert rows(ParquetRows(f"{WRITTEN / name}/" if (WRITTEN / name).is_dir() else str(WRITTEN / name), "y")) == ROWS


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("pandas-unnamed.parquet", ["__index_level_0__"]),
        ("pandas-named.parquet", ["id"]),
        ("pandas-multi.parquet", ["patient", "visit"]),
        ("dask.parquet", ["__null_dask_index__"]),
    ],
)
def test_an_index_is_no_feature_and_is_named(name, index):
    data = ParquetRows(str(WRITTEN / name), "y")
    assert (data.features, data.left_out) == (["a", "b", "band"], index)
    assert data.described() == f"a, b, band -> y; left out: {', '.join(index)}, an index"
    if index == ["id"]:
        assert ParquetRows(str(WRITTEN / name), "y", ["id", "a"])[1][0].tolist() == [3000, 1.5]


@pytest.mark.parametrize("tool", ["pandas", "polars", "pyarrow", "duckdb", "spark"])
def test_folders_of_partitions_are_columns(tool):
    folder = str(WRITTEN / f"{tool}-hive")
    assert ParquetRows(folder, "band", ["a"]).num_classes == 2
    for pattern in ("band=1", "*=1", "band=1/*.parquet"):
        rows_of_band = ParquetRows(f"{folder}/{pattern}", "y", ["a"]).__getitems__([0, 1, 2, 3])
        assert sorted(x.item() for x, _ in rows_of_band) == [1.5, 3.5, 5.5, 7.5]
    found = ParquetRows(f"{folder}/band=*", "y", ["band"]).__getitems__([0, 7])
    assert [x.tolist() for x, _ in found] == [[0], [1]]


def test_values_of_partitions(tmp_path):
    for value, folder in ((1, "t=0.5/s=a%20b"), (2, "t=-3/s=__HIVE_DEFAULT_PARTITION__")):
        write(tmp_path / folder / "0.parquet", a=[float(value)], y=[0])
    assert rows(ParquetRows(str(tmp_path), "y", ["a", "t"])) == [(1, 0.5, 0), (2, -3, 0)]
    with pytest.raises(ValueError, match=r"0\.parquet: the column s holds no numbers \(string\): name others"):
        ParquetRows(str(tmp_path), "y")
    for number, value in enumerate(("true", "false", "True")):
        write(tmp_path / f"x/seen={value}/{number}.parquet", a=[float(number)], y=[0])
    assert rows(ParquetRows(str(tmp_path / "x"), "y", ["a", "seen"])) == [(0, 1, 0), (1, 0, 0), (2, 1, 0)]
    assert ParquetRows(str(tmp_path / "x"), "seen", ["a"]).num_classes == 2
    (tmp_path / "x" / "_delta_log").mkdir()
    (tmp_path / "x" / "_delta_log" / "0.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a table of Delta Lake, whose files also hold rows that were deleted"):
        ParquetRows(str(tmp_path / "x"), "y")


@pytest.mark.parametrize("target", [None, "b"])
def test_numbers_that_float32_can_not_hold_are_refused_by_file_row_and_column(tmp_path, target):
    write(tmp_path / "0.parquet", a=[1.0, 2.0, 3.0], b=[1.0, float("inf"), -1e39])
    with pytest.raises(DataError, match=r"0\.parquet: column b has -1e\+39 in row 2, and the largest .* is 3\.4e\+38"):
        rows(ParquetRows(str(tmp_path), target))


def test_leftovers_are_not_read(tmp_path):
    for place in ("x.parquet/a.parquet", "x.parquet/.ipynb_checkpoints/a-checkpoint.parquet"):
        write(tmp_path / place, a=[1.0], y=[0])
    write(tmp_path / "x.parquet/_temporary/0/part-1.parquet", a=[1.0], y=[0])
    for name in ("_SUCCESS", "_metadata", "._a.parquet", ".a.parquet.crc", "__MACOSX/a.parquet"):
        (tmp_path / "x.parquet" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "x.parquet" / name).write_bytes(b"no table")
    for place in ("x.parquet", "x.parquet/", "*", "x.*/*.parquet", "**/*.parquet", "**"):
        assert len(ParquetRows(str(tmp_path / place) + ("/" if place.endswith("/") else ""), "y")) == 1, place
    spaced = (tmp_path / "x.parquet").rename(tmp_path / "x y.parquet")
    assert len(ParquetRows(spaced.as_uri(), "y")) == 1


def test_patterns_lists_and_names(tmp_path):
    for name in ("a/1.parquet", "a/2.parquet", "b/[3].parquet", "b/c/4.PARQUET"):
        write(tmp_path / name, a=[float(name[-9])] if name[-9].isdigit() else [3.0], y=[0])
    found = {
        "a/*.parquet": 2,
        "a/?.parquet": 2,
        "a/[2].parquet": 1,
        "*/*.parquet": 3,
        "**/*.parquet": 3,
        "b/[3].parquet": 1,
        "b": 2,
        "*": 4,
    }
    assert {pattern: len(ParquetRows(str(tmp_path / pattern), "y")) for pattern in found} == found
    assert len(ParquetRows([str(tmp_path / "a"), str(tmp_path / "b/*")], "y")) == 4
    with pytest.raises(FileNotFoundError, match=r"no file matches .*/a/x\*: it holds no file that ends with"):
        ParquetRows(str(tmp_path / "a/x*"), "y")


NUMBERS = {
    "bool": pa.array([True, False]),
    "int8": pa.array([1, 0], pa.int8()),
    "uint64": pa.array([1, 0], pa.uint64()),
    "float16": pa.array(np.array([1, 0], np.float16)),
    "decimal": pa.array([decimal.Decimal("1.00"), decimal.Decimal("0.00")]),
    "dictionary": pa.array([1, 0]).dictionary_encode(),
    "fixed": pa.array([[1.0], [0.0]], pa.list_(pa.float64(), 1)),
    "large list": pa.array([[1], [0]], pa.large_list(pa.int32())),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_kinds_of_numbers(tmp_path, kind):
    path = write(tmp_path / "a.parquet", a=NUMBERS[kind], y=[1, 0])
    assert rows(ParquetRows(path, "y")) == [(0, 0), (1, 1)]
    if kind in ("bool", "int8", "uint64", "dictionary"):
        data = ParquetRows(path, "a", ["y"])
        assert (rows(data), data.num_classes) == ([(0, 0), (1, 1)], 2)
        data.check_classes(None)


@pytest.mark.parametrize("statistics", [True, False])
def test_whole_targets_beyond_int64_are_refused(tmp_path, statistics):
    table = pa.table({"a": [1, 2], "y": pa.array([0, 2**64 - 1], pa.uint64())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", write_statistics=statistics)
    with pytest.raises(
        ValueError, match=rf"a\.parquet: the target y has {2**64 - 1}, and the largest one is {2**63 - 1}"
    ):
        ParquetRows(str(tmp_path / "a.parquet"), "y")


REFUSED = {
    "text": (["x", "y"], r"holds no numbers \(string\).*df\['c'\]\.astype\(pd.*\.cat\.codes"),
    "large text": (pa.array(["x", "y"], pa.large_string()), r"holds no numbers \(large_string\)"),
    "category": (pa.array(["x", "y"]).dictionary_encode(), r"holds no numbers \(dictionary<.*cat\.codes"),
    "time": ([datetime.datetime(2020, 1, 1)] * 2, r"holds no numbers \(timestamp.*total_seconds"),
    "day": ([datetime.date(2020, 1, 1)] * 2, r"holds no numbers \(date32"),
    "nulls": ([None, None], r"holds no numbers \(null"),
    "struct": ([{"u": 1}] * 2, r"holds no numbers \(struct"),
    "texts": ([["x"], ["y"]], r"holds no numbers \(list"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_columns_without_numbers_are_named(tmp_path, kind):
    values, message = REFUSED[kind]
    path = write(tmp_path / "a.parquet", a=[1.0, 2.0], c=values, y=[0, 1])
    with pytest.raises(ValueError, match=rf"a\.parquet: the column c {message}"):
        ParquetRows(path, "y")
    with pytest.raises(ValueError, match=rf"a\.parquet: the target c {message}"):
        ParquetRows(path, "c", ["a"])
    assert len(ParquetRows(path, "y", ["a"])) == 2


def test_vectors_of_one_length(tmp_path):
    path = write(tmp_path / "a.parquet", v=[[1, 2], [3, 4]], a=[5, 6], y=[0, 1])
    data = ParquetRows(path, "y")
    assert (data[1][0].tolist(), data.features) == ([3, 4, 6], ["v", "a"])
    assert data[-1][0].tolist() == [3, 4, 6]
    for values, message in (
        ([[1, 2], [3]], "has 1 numbers in row 1, and 2"),
        ([[1, 2], None], "is empty in row 1"),
        ([[], [1, 2]], "has 0 numbers in row 0, and 2"),
        (pa.array([[], []], pa.list_(pa.float64())), "is empty in all rows: name others with data.features="),
        (pa.array([None, None], pa.list_(pa.float64())), "is empty in all rows"),
    ):
        path = write(tmp_path / "b.parquet", v=values, y=[0, 1])
        with pytest.raises(DataError, match=rf"b\.parquet: column v {message}"):
            ParquetRows(path, "y")[1]


@pytest.mark.parametrize("value", [None, float("nan")])
def test_empty_cells_are_told_with_file_and_row(tmp_path, value):
    path = str(tmp_path / "a.parquet")
    table = pa.table(
        {"a": [1.0, 2.0, 3.0, value], "y": [0, 1, 0, 1], "z": pa.array([0, 1, 2, value], from_pandas=True)}
    )
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    with pytest.raises(DataError, match=r"a\.parquet: column a has 1 empty cells or NaN, the first in row 3: give"):
        ParquetRows(path, "y", ["a"])[2]
    with pytest.raises(DataError, match=r"a\.parquet: the target a has 1 empty cells or NaN, the first in row 3"):
        ParquetRows(path, "a", ["y"])[2]
    assert ParquetRows(path, "y", ["a", "z"], fill=-1)[3][0].tolist() == [-1, -1]


def test_files_that_differ(tmp_path):
    write(tmp_path / "1" / "a.parquet", a=[1], b=[2.0], y=[1])
    write(tmp_path / "1" / "b.parquet", y=[0.5], b=[3], a=[4.0])  # other order and types
    write(tmp_path / "1" / "c.parquet", a=pa.array([], pa.null()))  # without rows
    assert rows(ParquetRows(str(tmp_path / "1"), "y")) == [(1, 2, 1), (4, 3, 0.5)]
    write(tmp_path / "1" / "d.parquet", a=[1], b=[2.0], y=[1], c=[7])
    with pytest.raises(ValueError, match=r"d\.parquet has the column c, and .*a\.parquet has not: name the features"):
        ParquetRows(str(tmp_path / "1"), "y")
    assert len(ParquetRows(str(tmp_path / "1"), "y", ["a"])) == 3


def test_names_that_are_no_words(tmp_path):
    table = pa.table([pa.array([1, 2]), pa.array([3, 4]), pa.array([0, 1])], names=["0", "a.b", "2"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert rows(ParquetRows(str(tmp_path / "a.parquet"), 2, [0, "a.b"])) == [(1, 3, 0), (2, 4, 1)]
    twice = pa.table([pa.array([1]), pa.array([3]), pa.array([0])], names=["a", "a", "y"])
    pyarrow.parquet.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet has several columns a"):
        ParquetRows(str(tmp_path / "b.parquet"), "y")


@pytest.mark.parametrize(
    ("target", "num_classes", "message"),
    [
        ([-1, 1], None, r"y of .*a\.parquet holds -1 to 1, and classes are numbered from 0: write .*pd\.factorize"),
        ([1, 3], None, r"holds 1 to 3, and classes are numbered from 0: give model\.num_classes=4"),
        ([0.0, 1.0], None, r"holds double, and classes are whole numbers: write df\['y'\]\.astype\('int64'\)"),
        ([0.0, 1.0], 2, r"holds double"),
        ([0, 0], None, r"holds 0 only: give model\.num_classes"),
        ([0, 2], 2, r"holds 0 to 2, and the model has 2 classes, 0 to 1: give model\.num_classes=3"),
        ([0, 1], None, None),
        ([1, 3], 4, None),
        ([True, False], None, None),
        ([-100, 1], 2, None),
    ],
)
def test_targets_that_are_no_class_numbers(tmp_path, target, num_classes, message):
    for statistics in (True, False):
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pa.table({"a": [1, 2], "y": target}), path, write_statistics=statistics)
        data = ParquetRows(str(path), "y")
        if message is None:
            data.check_classes(num_classes, -100)
        else:
            with pytest.raises(ConfigError, match=message):
                data.check_classes(num_classes, -100)


def test_it_pickles_before_and_after_use(tmp_path):
    shutil.copytree(WRITTEN / "spark.parquet", tmp_path / "x.parquet")
    data = ParquetRows(str(tmp_path / "x.parquet"), "y")
    for _ in range(2):
        assert rows(pickle.loads(pickle.dumps(data))) == rows(data) == ROWS
