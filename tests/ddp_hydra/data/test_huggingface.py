"""Data sets of Hugging Face, whole and as streams."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest
import torch

from ddp_hydra.data import huggingface
from ddp_hydra.data.loader import Loader
from ddp_hydra.data.streams import StreamLoader, StreamSampler, is_stream, split
from ddp_hydra.errors import DataError

pytestmark = pytest.mark.medium

CPU = torch.device("cpu")


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)

    def load(path: str = "parquet", files: str = "rows-*.parquet", **options: Any) -> Any:
        return huggingface.load(path, files=str(tmp_path / files), cache_dir=str(tmp_path / "cache"), **options)

    for file in range(4):
        numbers = list(range(6 * file, 6 * file + 6))
        table = {"x": [[float(n), 0.5] for n in numbers], "label": numbers, "note": [f"number {n}" for n in numbers]}
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / f"rows-{file}.parquet", row_group_size=4)
    lines = [json.dumps({"text": "ab" * n, "n": n}) for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    yield load
    gc.collect()  # an iterator that ends sleeps for the time that is patched here


def test_whole_files_are_a_map_style_data_set_of_dicts(load):
    data = load(columns=["x", "label"], rename={"label": "labels"})
    assert not is_stream(data)
    (batch,) = Loader(data, CPU).load([[23, 0, 5]])
    assert batch["x"].tolist() == [[23, 0.5], [0, 0.5], [5, 0.5]]
    assert (batch["x"].dtype, batch["labels"].tolist()) == (torch.float32, [23, 0, 5])


@pytest.mark.parametrize("files", [4, 3])
def test_ranks_share_the_files_of_a_stream_or_its_samples(load, files):
    data = load(files=f"rows-[0-{files - 1}].parquet", streaming=True, columns="label")
    seen = []
    for rank in range(2):
        loader = StreamLoader(data, CPU)
        batches = [batch["label"].tolist() for batch, _ in loader.each_once(4, rank, 2)]
        seen += [number for batch in batches for number in batch]
    assert sorted(seen) == list(range(6 * files))
    how = "each rank reads 2 of 4 files" if files == 4 else "as 3 files do not divide by the ranks"
    assert how in split(data, 0, 2).how
    assert split(data, 0, 2).how.endswith("resumes by its state_dict")


@pytest.mark.parametrize("buffer", [0, 5])
@pytest.mark.parametrize("files", [4, 3])
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_stream_goes_on_where_its_state_was_saved(load, files, buffer, epoch):
    """A state does not hold the buffer; then samples are read again."""
    data = load(files=f"rows-[0-{files - 1}].parquet", streaming=True, shuffle_buffer=buffer)

    def read(sampler: StreamSampler, position: int = 0) -> list[list[int]]:
        steps = StreamLoader(data, CPU).steps(sampler.batches(epoch, position), 1)
        return [next(step).batch["label"].tolist() for step in steps]

    for rank in range(2):
        samplers = [StreamSampler(split(data, rank, 2), 2) for _ in range(2)]
        whole = read(samplers[0])
        steps = StreamLoader(data, CPU).steps(samplers[0].batches(epoch), 1)
        for _ in range(3):
            next(steps)
        samplers[0].gather(lambda own: [own, own])
        steps.close()
        assert (samplers[0].state is None) == bool(buffer)
        samplers[1].load_state_dict(samplers[0].state_dict())
        assert read(samplers[1], position=12) == whole[3:]
        assert read(samplers[1]) == whole  # and from its beginning


def test_json_lines_with_a_function_and_a_collate_of_ones_own(load):
    def lengths(sample: dict[str, Any]) -> dict[str, Any]:
        return {"length": len(sample["text"])}

    for streaming in (False, True):
        data = load("json", "rows.jsonl", transform=lengths, streaming=streaming, collate=list)
        loader = StreamLoader(data, CPU) if streaming else Loader(data, CPU)
        (batch, _), *_ = loader.each_once(3, 0, 1)
        assert [(sample["text"], int(sample["length"])) for sample in batch] == [("", 0), ("ab", 2), ("abab", 4)]


def test_no_secret_of_a_url_is_said(monkeypatch):
    url = "https://me:secret@host/a.csv?token=secret"
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=ValueError(f"no {url}")))
    with pytest.raises(ValueError, match=r"^https://host/a\.csv can't be read as csv: no https://host/a\.csv$"):
        huggingface.read("csv", files=url)


def test_mistakes_are_said(load, tmp_path):
    with pytest.raises(ValueError, match=r"path=parquet reads files: give data\.files="):
        huggingface.load("parquet")
    with pytest.raises(ValueError, match=r"there is no column prize, only x, label, note"):
        load(columns=["prize"])
    with pytest.raises(FileNotFoundError):
        load(files="nowhere.parquet")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl has no rows$"):
        huggingface.read("json", files=str(tmp_path / "empty.jsonl"))
    contents = {"no.txt": "", "blank.jsonl": "\n\n", "head.csv": "text\n", "broken.parquet": "x" * 50}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    for path, name, said in (
        ("text", "no.txt", r"no\.txt has no rows$"),
        ("json", "blank.jsonl", r"blank\.jsonl has no rows$"),
        ("csv", "head.csv", r"head\.csv has no rows$"),
        ("text", "*.zzz", r"\*\.zzz has no rows, or no file has such a name$"),
        ("parquet", "broken.parquet", r"broken\.parquet can't be read as parquet: "),
        ("jsonl", "blank.jsonl", r"path=jsonl: such files are read by data\.path=json$"),
    ):
        with pytest.raises(ValueError, match=said):
            huggingface.read(path, files=str(tmp_path / name))


def test_class_names_are_known(load, tmp_path):
    import datasets

    features = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"])})
    datasets.Dataset.from_dict({"label": [1, 0]}, features=features).to_parquet(str(tmp_path / "named.parquet"))
    assert load(files="named.parquet").classes == ["no", "yes"]
    assert load(files="named.parquet", streaming=True).classes == ["no", "yes"]


def test_an_edit_of_the_transform_or_of_what_it_calls_counts(load, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "edited.py").write_text(
        "import edited_factor\n\ndef scaled(sample, more=0):\n"
        "    return {'label': sample['label'] * edited_factor.FACTOR + more}\n"
    )

    def labels(factor: int, **more: int) -> list[int]:
        (tmp_path / "project" / "edited_factor.py").write_text(f"FACTOR = {factor}\n")
        for name in ("edited", "edited_factor"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        data = load(columns=["label"], transform=partial(importlib.import_module("edited").scaled, **more))
        return [int(data[n]["label"]) for n in (1, 2)]

    assert [labels(1), labels(1000), labels(1000, more=7), labels(1)] == [[1, 2], [1000, 2000], [1007, 2007], [1, 2]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0], [1.0, 2.0]], r"'x' has the shape \(1,\) in one and \(2,\) in another, so the samples make no batch"),
        (
            [None, 1.0],
            r"'x' has empty cells or NaN, so the samples make no batch: leave the column out with data\.columns",
        ),
        (["a", None], r"'x' has empty cells, so the samples make no batch"),
        ([None, None], r"'x' is a NoneType, so the samples make no batch"),
        (
            [datetime(2020, 1, 1)] * 2,
            r"'x' holds timestamp\[us\], of which torch makes no tensor: leave the column out",
        ),
        ([[date(2020, 1, 1)]] * 2, r"'x' holds date32, of which"),
        ([timedelta(1)] * 2, r"'x' holds duration\[us\], of which"),
        ([{"time": time(1)}] * 2, r"'x' holds time64\[us\], of which"),
        ([Decimal("1.5")] * 2, r"'x' holds decimal128\(2, 1\), of which"),
    ],
)
def test_a_column_that_makes_no_batch_is_named(load, tmp_path, values, message):
    pyarrow.parquet.write_table(pyarrow.table({"y": [0, 1], "x": values}), tmp_path / "odd.parquet")
    with pytest.raises(DataError, match=message):
        list(Loader(load(files="odd.parquet"), CPU).load([[0, 1]]))


def test_names_of_classes_and_fields_are_no_types(load, tmp_path):
    import datasets

    features = datasets.Features({"label": datasets.ClassLabel(names=["time"]), "x": {"date": datasets.Value("int64")}})
    rows = datasets.Dataset.from_dict({"label": [0], "x": [{"date": 1}]}, features=features)
    rows.to_parquet(str(tmp_path / "named.parquet"))
    assert load(files="named.parquet").classes == ["time"]
