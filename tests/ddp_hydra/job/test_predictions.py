"""Parts of predictions become files: whole, in order, and of nothing else."""

from __future__ import annotations

import csv
import hashlib
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.job import predictions
from ddp_hydra.job.predictions import Parts
from ddp_hydra.rank import spec
from ddp_hydra.record import File, Record, Rows
from ddp_hydra.training import inference as outputs

SCORES = np.array([0.1, 0.25, -3e-8, 1.0, 0.3], np.float32)
NAMES = ["a", 'b "quoted", with a comma', "", "ü", "longest of all"]


def columns(part: slice) -> dict:
    mask = np.arange(5 * 6).reshape(5, 2, 3)[part]
    return {"id": NAMES[part], "score": SCORES[part], "mask": mask}


def file_record(folder: Path, number: int, content: dict, path: str = "") -> Record:
    source = folder / f"source-{number}"
    with source.open("wb") as file:
        spec.write_rows(file, content)
    data = source.read_bytes()
    fields = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "source": str(source)}
    return Record(File(path=path or spec.ROWS_NAME.format(number), **fields))


def fetch(record: Record, target: Path) -> None:
    Path(record.data.source).rename(target)


@pytest.fixture
def parts(tmp_path) -> Parts:
    found = Parts(tmp_path / "out.parts", {"checkpoint": "1"})
    found.receive(Record(Rows(5, 2)), fetch)
    return found


def fill(parts: Parts, folder: Path, kind: str) -> None:
    for number in (2, 0, 1):  # in any order
        part = slice(2 * number, min(2 * number + 2, 5))
        size = part.stop - part.start
        content = columns(part)
        if kind == "table":
            content.pop("mask")
        if kind != "arrays":
            content = outputs.columns(content, size, kind)
        parts.receive(file_record(folder, number, content), fetch)


def write(parts: Parts, out: Path, kind: str) -> None:
    fill(parts, out.parent, kind)
    predictions.write(out, parts.merged, 5)


def test_csv(parts, tmp_path):
    write(parts, tmp_path / "out.csv", "table")
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["index"] for row in table] == list("01234")
    assert [row["id"] for row in table] == NAMES
    assert [row["score"] for row in table] == ["0.1", "0.25", "-3e-08", "1.0", "0.3"]


def test_a_text_with_a_line_break_of_any_kind_is_one_cell(tmp_path):
    texts = ["one\rtwo", "one\ntwo", "one\r\ntwo", "\r", "\r\n", "plain", None]
    chunk = {"index": np.arange(7), "text": texts, "score": np.arange(7, dtype=np.float32)}
    predictions.write(tmp_path / "out.csv", lambda: [chunk], 7)
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["text"] for row in table] == [*texts[:-1], ""]
    assert [row["score"] for row in table] == [f"{number}.0" for number in range(7)]
    assert (tmp_path / "out.csv").read_bytes().endswith(b"\n5,plain,5.0\n6,,6.0\n")


def test_parquet(parts, tmp_path):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    write(parts, tmp_path / "out.parquet", "table")
    table = pandas.read_parquet(tmp_path / "out.parquet")
    assert list(table.columns) == ["index", "id", "score"]
    assert table["id"].tolist() == NAMES
    assert np.array_equal(table["score"].to_numpy(), SCORES)
    assert table["score"].dtype == np.float32


def test_npz(parts, tmp_path):
    write(parts, tmp_path / "out.npz", "arrays")
    with np.load(tmp_path / "out.npz", allow_pickle=False) as found:
        assert found["id"].tolist() == NAMES
        assert np.array_equal(found["score"], SCORES)
        assert np.array_equal(found["mask"], np.arange(30).reshape(5, 2, 3))
        assert np.array_equal(found["index"], np.arange(5))
    assert {path.name for path in tmp_path.iterdir()} == {"out.npz", "out.parts"}


def test_pictures(parts, tmp_path):
    write(parts, tmp_path / "out", "pictures")
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["mask"] for row in table] == [f"{number:08d}.png" for number in range(5)]
    assert [row["id"] for row in table] == NAMES
    for number, row in enumerate(table):
        assert np.array_equal(
            np.asarray(Image.open(tmp_path / "out" / row["mask"])), np.arange(30).reshape(5, 2, 3)[number]
        )


@pytest.mark.parametrize(
    "path",
    ["parts/part-00000003.rows", "parts/part-1.rows", "parts/../x.rows", "plan.json", "parts/part-00000000.rows/x"],
)
def test_a_rank_can_write_nothing_but_parts(parts, tmp_path, path):
    with pytest.raises(RecordError, match=r"not a part of 3|not allowed"):
        parts.receive(file_record(tmp_path, 0, columns(slice(0, 2)), path), fetch)


def test_rows_that_are_missing_or_too_many_are_found(parts, tmp_path):
    fill(parts, tmp_path, "arrays")
    parts.receive(file_record(tmp_path, 1, columns(slice(0, 1))), fetch)
    with pytest.raises(RecordError, match="ends with row 3 of 4"):
        list(parts.merged())
    parts.receive(file_record(tmp_path, 1, columns(slice(0, 3))), fetch)
    with pytest.raises(RecordError, match="does not hold rows 2 to 4"):
        list(parts.merged())
    parts.receive(file_record(tmp_path, 1, {"id": NAMES[:2]}), fetch)
    with pytest.raises(RecordError, match="are id, not "):
        list(parts.merged())
    for length in (b"\0" * 7 + b"\1", b"\0" * 7 + b"\2", b"\x7f" + b"\xff" * 7, b"\xff" * 8):
        parts.path(1).write_bytes(length + b"\xc1")
        with pytest.raises(RecordError):
            list(parts.merged())


def test_parts_of_another_prediction_are_refused_or_dropped(parts, tmp_path):
    fill(parts, tmp_path, "arrays")
    assert Parts(parts.folder, {"checkpoint": "1"}).done() == [0, 1, 2]
    with pytest.raises(ConfigError, match="overwrite=true"):
        Parts(parts.folder, {"checkpoint": "2"})
    assert Parts(parts.folder, {"checkpoint": "2"}, overwrite=True).done() == []


@pytest.mark.parametrize("content", ["{", '{"plan": {}, "samples": -1, "rows": 2}', '{"format": 2, "plan": {}}', "[1]"])
def test_a_plan_that_is_broken_is_a_sentence(content, tmp_path):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ConfigError, match=r"plan.json can't be read .*: give overwrite=true to drop it"):
        Parts(tmp_path, {"checkpoint": "1"})
    assert Parts(tmp_path, {"checkpoint": "1"}, overwrite=True).read_plan() is None


def test_a_data_set_that_has_changed_since_is_refused(parts):
    with pytest.raises(ConfigError, match="has 6 samples"):
        Parts(parts.folder, {"checkpoint": "1"}).receive(Record(Rows(6, 2)), fetch)


def test_the_number_of_samples_may_be_told_at_the_end(tmp_path):
    parts = Parts(tmp_path / "parts", {"checkpoint": "1"})
    with pytest.raises(RecordError, match="not a part of"):
        parts.receive(file_record(tmp_path, 0, columns(slice(0, 2))), fetch)
    unknown = Record(Rows(None, 2))
    parts.receive(unknown, fetch)
    for part, own in ((2, slice(4, 5)), (0, slice(0, 2))):
        parts.receive(file_record(tmp_path, part, columns(own)), fetch)
    parts = Parts(tmp_path / "parts", {"checkpoint": "1"})  # after an interrupt
    assert (parts.samples, parts.length, parts.done()) == (None, 2, [0, 2])
    parts.receive(unknown, fetch)
    parts.receive(file_record(tmp_path, 1, columns(slice(2, 4))), fetch)
    parts.receive(Record(Rows(5, 2)), fetch)
    parts.receive(unknown, fetch)  # of a rank that began late
    assert (parts.samples, parts.total) == (5, 3)
    assert [index for chunk in parts.merged() for index in chunk["index"]] == list(range(5))


def test_parquet_is_written_in_groups_of_rows(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "_GROUP_ROWS", 3)
    write(parts, tmp_path / "out.parquet", "table")
    file = pytest.importorskip("pyarrow.parquet").ParquetFile(tmp_path / "out.parquet")
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [4, 1]
    assert file.read().column("id").to_pylist() == NAMES


PROMOTED = [
    {"count": np.array([1, 2]), "name": ["a", None], "small": np.float32([1, 2]), "is": np.array([True, False])},
    {
        "count": np.array([0.5, np.nan]),
        "name": [None, None],
        "small": np.float64([3, 4]),
        "is": np.array([1.0, np.nan]),
    },
    {"count": np.array([3]), "name": ["ab"], "small": np.array([5], np.uint8), "is": [None]},
    {"count": [None], "name": [None], "small": np.float32([6]), "is": np.array([True])},
]
"""Parts whose columns have one kind together."""


@pytest.mark.parametrize("groups", [1, 100])
@pytest.mark.parametrize("parts", [PROMOTED, PROMOTED[::-1]], ids=["numbers first", "none first"])
def test_a_column_of_whole_numbers_in_one_part_and_fractions_in_another_is_written(
    tmp_path, monkeypatch, groups, parts
):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    monkeypatch.setattr(predictions, "_GROUP_ROWS", groups)
    for name in ("a.csv", "a.parquet", "a.npz"):
        predictions.write(tmp_path / name, lambda: parts, 6)
    wanted = {
        "count": [[1, 2], [0.5, np.nan], [3], [np.nan]],
        "small": [[1, 2], [3, 4], [5], [6]],
        "is": [[1, 0], [1, np.nan], [np.nan], [1]],
        "name": [["a", ""], ["", ""], ["ab"], [""]],
    }
    wanted = {name: [*chain(*found[:: 1 if parts is PROMOTED else -1])] for name, found in wanted.items()}
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert {name: found[name].dtype.kind for name in wanted} == {"count": "f", "small": "f", "is": "f", "name": "U"}
        for name, values in wanted.items():
            np.testing.assert_array_equal(found[name], values)
    table = pandas.read_parquet(tmp_path / "a.parquet")
    assert table["name"].fillna("").tolist() == wanted.pop("name")
    assert table["name"].isna().sum() == 4
    for name, values in wanted.items():
        np.testing.assert_array_equal(table[name], values)
    np.testing.assert_array_equal(pandas.read_csv(tmp_path / "a.csv")["count"], wanted["count"])


def test_a_column_that_is_missing_everywhere_is_empty(tmp_path):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    for name in ("a.parquet", "a.npz"):
        predictions.write(tmp_path / name, lambda: [{"a": [None]}, {"a": [None]}], 2)
    assert pandas.read_parquet(tmp_path / "a.parquet")["a"].isna().all()
    assert np.load(tmp_path / "a.npz")["a"].tolist() == ["", ""]


@pytest.mark.parametrize("name", ["a.parquet", "a.npz"])
def test_a_column_of_texts_in_one_part_and_numbers_in_another_is_refused(tmp_path, name):
    pytest.importorskip("pyarrow")
    chunks = [{"size": np.array([1])}, {"size": ["large"]}]
    with pytest.raises(ConfigError, match=r"return one kind$"):
        predictions.write(tmp_path / name, lambda: chunks, 2)
    assert not list(tmp_path.iterdir())


def test_arrays_that_fit_in_no_common_one_are_refused(tmp_path):
    chunks = [{"mask": np.zeros((2, 3))}, {"mask": np.zeros((2, 4))}]
    with pytest.raises(ConfigError, match=r"arrays float64 \(4,\) and float64 \(3,\): where samples differ in length"):
        predictions.write(tmp_path / "out.npz", lambda: chunks, 4)
    assert not list(tmp_path.iterdir())


def test_what_no_file_can_be_is_said(monkeypatch):
    with pytest.raises(ConfigError, match=r"\.csv, \.parquet or \.npz"):
        predictions.kind_of(Path("out.txt"))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install 'ddp-hydra\[parquet\]', or give out=predictions.csv"):
        predictions.kind_of(Path("out.parquet"))


def test_a_folder_that_no_prediction_has_made_is_refused_and_stays(tmp_path):
    folder = tmp_path / "out.parts"
    predictions.check_folder(folder, "out")  # it is new
    (folder / "parts").mkdir(parents=True)
    predictions.check_folder(folder, "out")
    for name in (".lock", "logs/rank-0.log", "parts/part-00000000.rows"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    predictions.check_folder(folder, "out")  # it was interrupted early
    for name, content in (("list.txt", "mine"), ("plan.json", "{}"), ("plan.json", "no JSON"), ("parts/mine", "")):
        (folder / name).write_text(content)
        with pytest.raises(ConfigError, match=r"^out=out needs .*: give another out="):
            predictions.check_folder(folder, "out")
        (folder / name).unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "link.parts").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="no prediction has made that"):
        predictions.check_folder(tmp_path / "link.parts", "link")


def test_what_others_have_put_between_the_parts_stays(parts, tmp_path):
    fill(parts, tmp_path, "table")
    (parts.folder / "notes.txt").write_text("mine")
    predictions.check_folder(parts.folder, "out")
    predictions.remove_parts_in(parts.folder)
    assert [path.name for path in parts.folder.iterdir()] == ["notes.txt"]
