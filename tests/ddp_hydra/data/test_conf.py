"""The configs of the data sets and models: every key reaches the class that it is for."""

from __future__ import annotations

import io
import json
import random
import tarfile
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hydra import compose, initialize_config_dir

from ddp_hydra.config.hydra_compat import VERSION_BASE, instantiate
from ddp_hydra.data import demo_server

CONF = str(Path(__file__).parents[3] / "conf")


def read(name, *overrides):
    with initialize_config_dir(CONF, **VERSION_BASE):
        return compose(name, overrides=["+seed=5", *overrides])


@pytest.fixture
def names_file(tmp_path):
    path = tmp_path / "names.json"
    path.write_text(json.dumps([f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]))
    return path


@pytest.mark.integration
def test_s3_images_is_the_embedded_digits(monkeypatch):
    every = demo_server.digits
    monkeypatch.setattr(demo_server, "digits", lambda: islice(every(), 120))  # to fill it with all takes seconds
    data = read("data/s3_images").data
    train, val = instantiate(data.train), instantiate(data.val)
    try:
        assert (data.batch_size, train.seed, len(train) + len(val)) == (32, 5, 120)
        assert train[0][0].shape == val[0][0].shape == (3, 32, 32)
    finally:
        train.close()
        val.close()


@pytest.mark.medium
def test_pet_names_holdout_has_one(names_file):
    data = read("data/pet_names", f"data.source={names_file}", "data.window=5").data
    assert (data.batch_size, data.val) == (16384, None)
    assert instantiate(data.train).windows.shape == (64 * 3, 6)
    data = read("data/pet_names_holdout", f"data.source={names_file}", "data.holdout=0.3").data
    train, val = instantiate(data.train), instantiate(data.val)
    assert data.name == "pet_names"
    assert sorted(train.names + val.names) == json.loads(names_file.read_text())
    assert val.names


@pytest.mark.medium
@pytest.mark.parametrize("name", ["s3_photos", "image_table"])
def test_photos_are_cut_as_imagenet_is(name, png, tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        (tmp_path / part / "cat" / "1.png").write_bytes(png(red=9, size=300))
        (tmp_path / f"{part}.csv").write_text(f"path,label\n{part}/cat/1.png,cat\n")
    where = {
        "s3_photos": [f"data.bucket=file://{tmp_path}"],
        "image_table": [f"data.table={tmp_path}/train.csv", f"data.val_table={tmp_path}/val.csv"],
    }
    given = ("data.threads=3", "data.hue=0.1", "data.max_bad_fraction=0.5", "data.cache_mb=0")
    data = read(f"data/{name}", *where[name], *given).data
    for part in (data.train, data.val):
        dataset = instantiate(part)
        assert (dataset[0][0].shape, dataset.threads, dataset.seed) == ((3, 224, 224), 3, 5)
        assert (dataset.max_bad_fraction, dataset.cache_mb) == (0.5, 0)
        dataset.close()
    assert instantiate(data.train.transform).jitter.hue == 0.1
    assert instantiate(data.val.transform).center_crop == 0.875


@pytest.mark.medium
@pytest.mark.parametrize("size", [224, 32])
def test_validation_sees_as_much_of_a_photo_at_any_size(size):
    data = read("data/s3_photos", "data.bucket=file:///photos", f"data.image_size={size}").data
    look = instantiate(data.val.transform).draw(256, 300, random.Random(0))
    assert (look.top, look.left, look.height, look.width) == (16, 38, 224, 224)


@pytest.mark.medium
def test_parquet_rows_and_huggingface_read_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        table = pyarrow.table({"a": [1.0, 2.0, 3.0], "note": ["x", "y", "z"], "label": [0, 1, 0]})
        pyarrow.parquet.write_table(table, tmp_path / part / "0.parquet")
    where = [f"data.files={tmp_path}/train", f"data.val_files={tmp_path}/val"]
    rows = read("data/parquet_rows", *where, "data.target=label", "data.features=[a]").data
    for part in (rows.train, rows.val):
        dataset = instantiate(part)
        assert [value.tolist() for value in dataset[2]] == [[3.0], 0]
        dataset.close()
    where = [f"data.files='{tmp_path}/train/*.parquet'", f"data.val_files='{tmp_path}/val/*.parquet'"]
    choices = ("data.path=parquet", "data.columns=[a,label]", "data.rename={label: labels}")
    for streaming in ("true", "false"):
        given = [*where, *choices, f"data.streaming={streaming}", f"data.cache_dir={tmp_path}/cache"]
        data = read("data/huggingface", *given).data
        for part in (data.train, data.val):
            sample = list(instantiate(part))[2]
            assert {name: value.item() for name, value in sample.items()} == {"a": 3.0, "labels": 0}


def test_webdataset_reads_tuples(tmp_path, png):
    for part in ("train", "val"):
        with tarfile.open(tmp_path / f"{part}-0.tar", "w") as tar:
            for name, content in (("1.cls", b"7"), ("1.png", png(red=255, size=2))):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    data = read("data/webdataset", f"data.urls={tmp_path}/train-0.tar", f"data.val_urls={tmp_path}/val-0.tar").data
    for part in (data.train, data.val):
        ((image, label),) = instantiate(part)
        assert (image.shape, image[0, 0, 0].item(), label) == ((3, 2, 2), 1.0, 7)
