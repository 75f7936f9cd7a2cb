from __future__ import annotations

import re
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from ddp_hydra.data import ParquetRows
from ddp_hydra.data.batch import make_batch
from ddp_hydra.data.draws import Indices
from ddp_hydra.data.loader import Loader
from ddp_hydra.data.mix import Mix
from ddp_hydra.data.samplers import Chunked
from ddp_hydra.data.wrappers import look_into
from ddp_hydra.errors import ConfigError, DataError
from ddp_hydra.storage.base import TemporaryError


def write(path: Path, rows: int = 25, begin: int = 0, **columns: Any) -> str:
    numbers = np.arange(begin, begin + rows)
    table = {"a": numbers.astype(np.float64), "b": numbers * 2, "label": numbers % 3, **columns}
    pyarrow.parquet.write_table(pyarrow.table(table), path, row_group_size=10)
    return str(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path / "0.parquet")
    write(tmp_path / "1.parquet", begin=25)
    (tmp_path / "notes.txt").write_text("no rows")
    return tmp_path


def test_rows_of_all_files_by_index(folder):
    data = ParquetRows(str(folder), "label")
    assert (len(data), data.shard_lengths, data.features) == (50, [10, 10, 5, 10, 10, 5], ["a", "b"])
    x, y = data.collate(data.__getitems__([49, 0, 24, 25, 0]))
    assert x.tolist() == [[49, 98], [0, 0], [24, 48], [25, 50], [0, 0]]
    assert y.tolist() == [1, 0, 0, 1, 0]
    assert (x.dtype, y.dtype, data.num_classes) == (torch.float32, torch.int64, 3)
    assert [part.tolist() for part in data[7]] == [[7, 14], 1]
    with pytest.raises(IndexError):
        data[50]
    data.close()


def test_columns_of_several_values_do_not_shift_the_others(tmp_path):
    pairs = [{"x": number, "y": 100 + number} for number in range(6)]
    table = pyarrow.table({"pair": pairs, "list": [[1], [2, 3]] * 3, "a": [1.5] * 6, "label": [0, 1, 2] * 2})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert ParquetRows(str(tmp_path / "a.parquet"), "label", ["a"]).num_classes == 3


def test_some_columns_a_float_target_or_none(folder):
    ((x, y),) = ParquetRows(str(folder / "0.parquet"), "a", ["b"]).__getitems__([3])
    assert (x.tolist(), y.tolist(), y.dtype) == ([6], 3, torch.float32)
    x = ParquetRows([str(folder / "0.parquet"), str(folder / "1.parquet")], features=["label", "a"])[30]
    assert x.tolist() == [0, 30]
    assert ParquetRows(str(folder / "0.parquet"), "label", "a").features == ["a"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("target", ["label", None])
def test_torchs_own_loader_makes_the_same_batches(folder, target, workers):
    data = ParquetRows(str(folder), target)
    for dataset, batches in ((data, [[0, 1, 2], [3, 4, 5]]), (Subset(data, [7, 3, 9]), [[0, 2], [1]])):
        chosen = [[dataset.indices[index] for index in batch] for batch in batches] if dataset is not data else batches
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=workers)
        for batch, indices in zip(loader, chosen, strict=True):
            wanted = make_batch(data, Indices(indices))
            for part, other in zip(batch, wanted, strict=True):
                assert torch.equal(part, other)
                assert part.dtype == other.dtype


def test_a_batch_of_rows_of_several_sets(folder):
    sets = [ParquetRows(str(folder / f"{number}.parquet"), "label") for number in (0, 1)]
    both, n = look_into(ConcatDataset(sets)), len(sets[0])
    x, y = make_batch(both, Indices([n + 1, 1, 2, n + 2]))
    rows = [sets[1][1], sets[0][1], sets[0][2], sets[1][2]]
    assert torch.equal(x, torch.stack([row[0] for row in rows]))
    assert y.tolist() == [row[1].item() for row in rows]


@pytest.mark.parametrize("together", [ConcatDataset, lambda parts: Mix(dict(zip("xy", parts, strict=True)))])
def test_sets_with_columns_in_another_order_are_refused_together(tmp_path, together):
    one = ParquetRows(write(tmp_path / "0.parquet"), "label")
    pyarrow.parquet.write_table(pyarrow.table({"b": [2], "a": [1.0], "label": [0]}), tmp_path / "1.parquet")
    with pytest.raises(ConfigError, match=r"\[a,b\] and \[b,a\], .*: give features=\[a,b\] to each"):
        look_into(together([Subset(one, range(5)), ParquetRows(str(tmp_path / "1.parquet"), "label")]))
    data = look_into(together([one, ParquetRows(str(tmp_path / "1.parquet"), "label", one.features)]))
    assert [part.tolist() for part in data[25]] == [[1, 2], 0]
    assert data.features == ["a", "b"]


def test_a_list_of_samples_is_no_list_of_columns():
    class Texts(list):
        @property
        def features(self):
            return list(self)

    assert len(look_into(ConcatDataset([Texts(["one", "two"]), Texts(["three"])]))) == 3


def test_a_loader_and_the_chunked_sampler_read_row_groups_one_after_the_other(folder):
    data = ParquetRows(str(folder), "label", cache_mb=0)
    sampler = Chunked(len(data), 5, shard_lengths=data.shard_lengths, interleave=1)
    loader = Loader(data, torch.device("cpu"))
    seen = [value for x, _ in loader.load(sampler.batches(0)) for value in x[:, 0].int().tolist()]
    assert sorted(seen) == list(range(50))
    assert len(data._cache) == 1
    data.close()


def test_memory_is_bounded_and_threads_read_the_same(folder):
    threads = threading.active_count()
    whole, small = ParquetRows(str(folder), "label"), ParquetRows(str(folder), "label", cache_mb=0.0002)
    wanted = [list(np.random.RandomState(seed).permutation(50)[:9]) for seed in range(20)]
    with ThreadPoolExecutor(4) as pool:
        for batch, rows in zip(wanted, pool.map(small.__getitems__, wanted), strict=True):
            for (x, y), (other_x, other_y) in zip(rows, whole.__getitems__(batch), strict=True):
                assert torch.equal(x, other_x)
                assert torch.equal(y, other_y)
    assert len(small._cache) == 1 < len(whole._cache) == 6
    assert threading.active_count() <= threads + 4


def test_mistakes_are_said_in_a_sentence(tmp_path, folder):
    with pytest.raises(ValueError, match=r"has no column price, only a, b, label: type data\.target="):
        ParquetRows(str(folder), "price")
    named = write(tmp_path / "named.parquet", name=["x"] * 25)
    with pytest.raises(ValueError, match=r"column name holds no numbers \(string\): name others with"):
        ParquetRows(named, "label")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 but not really")
    with pytest.raises(ValueError, match=r"broken\.parquet can't be read as a Parquet file"):
        ParquetRows(str(broken), "label")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no file that ends with \.parquet"):
        ParquetRows(str(tmp_path / "empty"), "label")
    with pytest.raises(FileNotFoundError):
        ParquetRows(str(tmp_path / "nowhere.parquet"), "label")
    with pytest.raises(ValueError, match=r"no files are given: .* data\.val=null"):
        ParquetRows(None, "label")
    nothing = write(tmp_path / "nothing.parquet", rows=0)
    with pytest.raises(ValueError, match=r"has no rows"):
        ParquetRows(nothing, "label")


@pytest.mark.usefixtures("credentials")
@pytest.mark.medium
def test_rows_from_a_store(s3, folder):
    """Only the columns that are asked for are read, by ranges."""
    bucket = s3.fill({"rows/0.parquet": (folder / "0.parquet").read_bytes()})
    data = ParquetRows(f"s3://{bucket}/rows", "label", ["a"], endpoint_url=s3.endpoint_url)
    assert [part.tolist() for part in data[24]] == [[24], 0]
    assert data.stats()["requests"] > 0
    data.close()


@pytest.mark.medium
@pytest.mark.parametrize("text", ["a,b\n1.5,2\n", "a;b\n1,5;2\n", "a\tb\n1.5\t2\n"])
def test_a_csv_file_is_told_with_how_to_convert_it(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ValueError, match="is not a Parquet file") as caught:
        ParquetRows("rows.csv", "b")
    command, files = re.fullmatch(r".*: type python (-c .*), and give (.*) in its place", str(caught.value)).groups()
    option, code = shlex.split(command)
    assert option == "-c"
    exec(code, {})
    assert [part.tolist() for part in ParquetRows(files, "b", "a")[0]] == [[1.5], 2]


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_the_index_of_a_csv_file_is_no_feature(tmp_path, name):
    file = str(tmp_path / "t.parquet")
    pyarrow.parquet.write_table(pyarrow.table({name: [1, 2], "a": [2.5, 3.5], "y": [0, 1]}), file)
    data = ParquetRows(file, "y")
    assert (data.features, data[1][0].tolist()) == (["a"], [3.5])
    assert data.described() == f"a -> y; left out: {name or 'a column without a name'}, an index"
    assert ParquetRows(file, "y", [name, "a"]).features == [name, "a"]


@pytest.mark.parametrize("compression", ["snappy", "zstd"])
def test_a_damaged_page_is_named_by_file_column_and_row_group(tmp_path, compression):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"a": np.arange(90.0), "b": np.arange(90.0), "label": [0, 1, 2] * 30}), path,
        row_group_size=45, compression=compression, use_dictionary=["b"],
    )  # fmt: skip
    content, chunks = path.read_bytes(), pyarrow.parquet.ParquetFile(path).metadata.row_group(1)
    for place, start in (("a", chunks.column(0).data_page_offset), ("b", chunks.column(1).dictionary_page_offset)):
        path.write_bytes(content[:start] + bytes(60) + content[start + 60 :])
        data = ParquetRows(str(path), "label")
        assert len(data.__getitems__(range(45))) == 45
        said = rf"a\.parquet: column {place} of row group 1 can't be read \([^\n]+\): the file is damaged: copy"
        with pytest.raises(DataError, match=said):
            data[50]


def test_an_error_of_the_store_is_no_damage(folder, monkeypatch):
    data = ParquetRows(str(folder / "0.parquet"), "label")
    monkeypatch.setattr(
        "ddp_hydra.storage.local.LocalFolder.get_range", lambda *_: (_ for _ in ()).throw(TemporaryError("away"))
    )
    with pytest.raises(TemporaryError, match=r"^away$"):
        data[0]


def test_a_target_with_a_dot_is_no_field_of_a_struct(tmp_path):
    table = {"b": [1.0, 2.0, 3.0], "a": [{"y": 100 + number} for number in range(3)], "a.y": [0, 1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    assert ParquetRows(str(tmp_path / "a.parquet"), "a.y", ["b"]).num_classes == 3


@pytest.mark.parametrize("kind", [pyarrow.list_(pyarrow.float64()), pyarrow.list_(pyarrow.float64(), 2)])
def test_vectors_and_numbers_in_one_column_are_refused(tmp_path, kind):
    vectors = pyarrow.array([[1.0, 2.0]] * 25, kind)
    write(tmp_path / "0.parquet", a=vectors)
    write(tmp_path / "1.parquet")
    with pytest.raises(ValueError, match=r"1\.parquet: column a has 1 numbers in a row, and 2 in .*0\.parquet"):
        ParquetRows(str(tmp_path), "label")
    write(tmp_path / "1.parquet", a=pyarrow.array([[1.0, 2.0, 3.0]] * 25, pyarrow.list_(pyarrow.float64(), 3)))
    with pytest.raises(ValueError, match=r"1\.parquet: column a has 3 numbers in a row, and 2 in"):
        ParquetRows(str(tmp_path), "label")
    write(tmp_path / "1.parquet", a=vectors)
    assert len(ParquetRows(str(tmp_path), "label")) == 50
    write(tmp_path / "0.parquet", a=pyarrow.array([[1.0]] * 25))  # one number, as a vector
    write(tmp_path / "1.parquet")
    assert ParquetRows(str(tmp_path), "label")[30][0].tolist() == [5, 10]
