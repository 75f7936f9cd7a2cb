"""What `ddp_hydra.data` offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

import ddp_hydra.data
from ddp_hydra.data import ImageTable, ParquetRows, S3ImageFolder, TarSamples, WidsImages, WidsShards, huggingface
from ddp_hydra.data.shards.write import write_shards


def test_all_names_can_be_imported_and_others_are_refused():
    for name in ddp_hydra.data.__all__:
        assert getattr(ddp_hydra.data, name).__name__ == name
    with pytest.raises(AttributeError, match=r"module 'ddp_hydra\.data' has no attribute 'Photos'"):
        ddp_hydra.data.Photos  # noqa: B018


@pytest.mark.integration
def test_the_package_alone_imports_no_torch():
    code = "import sys, ddp_hydra.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


@pytest.mark.medium
def test_paths_of_pathlib_are_taken(tmp_path, png, monkeypatch):
    for number in range(2):
        (tmp_path / "images" / str(number)).mkdir(parents=True)
        (tmp_path / "images" / str(number) / "a.png").write_bytes(png())
    (tmp_path / "images" / "table.csv").write_text("path,label\n0/a.png,0\n1/a.png,1\n")
    write_shards(str(tmp_path / "images"), str(tmp_path / "shards"))
    pyarrow.parquet.write_table(pyarrow.table({"a": [0.0, 1.0], "y": [0, 1]}), tmp_path / "rows.parquet")
    index, tar = tmp_path / "shards" / "index.json", next((tmp_path / "shards").glob("*.tar"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    table = Path("images/table.csv")
    made = [
        S3ImageFolder(Path("images"), Path()),
        S3ImageFolder(Path("~/images")),
        ImageTable(table),
        ImageTable(table, Path("images"), classes_from=table),
        WidsImages(index, base=tar.parent),
        WidsShards(index),
        ParquetRows(tmp_path / "rows.parquet", "y"),
        ParquetRows([tmp_path / "rows.parquet"], "y"),
        huggingface.load("parquet", files=tmp_path / "rows.parquet", cache_dir=str(tmp_path / "cache")),
    ]
    assert [len(one) for one in made] == [2] * len(made)
    assert TarSamples(tar).urls == TarSamples([tar]).urls == [str(tar)]
    for one in made[:-1]:
        one.close()
