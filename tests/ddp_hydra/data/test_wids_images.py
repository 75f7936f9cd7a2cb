"""Training images out of tar shards: what a sample is, and what is lost with a shard."""

from __future__ import annotations

import errno
import gc
import gzip
import io
import json
import os
import pickle
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ddp_hydra.data.shards import cache as cache_module
from ddp_hydra.data.shards.cache import GIB
from ddp_hydra.data.shards.cache_folder import with_index
from ddp_hydra.data.shards.index import read_index
from ddp_hydra.data.shards.write import write_shards
from ddp_hydra.data.transforms import EvalTransform
from ddp_hydra.data.wids import WidsImages
from ddp_hydra.storage.base import StaleCredentialsError
from tests.support.shard_caches import wait_until


@pytest.fixture
def shards(tmp_path, png) -> Path:
    """An index of 40 images in 8 shards; the red of each is its number, the class its last digit's parity."""
    for number in range(40):
        path = tmp_path / "images" / ("odd" if number % 2 else "even") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(red=number, size=40))
    write_shards(str(tmp_path / "images"), str(tmp_path / "shards"), shard_mb=6 / 1024)
    return tmp_path / "shards" / "index.json"


@pytest.fixture
def images():
    """Open an index, and close it after the test."""
    opened = []

    def open_(index, **arguments) -> WidsImages:
        arguments = {"transform": EvalTransform(40), "cache_dir": None, **arguments}
        opened.append(WidsImages(str(index), **arguments))
        return opened[-1]

    yield open_
    for dataset in opened:
        dataset.close()


@pytest.fixture
def cached(tmp_path, png, images, monkeypatch):
    """Open three packed shards of three images, of which some are damaged, in a cache that holds a few shards."""
    monkeypatch.setattr(cache_module, "WAIT_S", 2.0)

    def open_(n_shards: int, damaged: tuple[int, ...] = (), **arguments) -> WidsImages:
        urls = []
        for shard in range(3):
            numbers = range(3 * shard, 3 * shard + 3)
            contents = [b"no image" if number in damaged else png(red=number, size=100) for number in numbers]
            (folder := tmp_path / f"{shard}").mkdir()
            write(folder, [{".png": content, ".cls": b"0"} for content in contents])
            plain = (folder / "one.tar").read_bytes()
            (folder / "one.tar.gz").write_bytes(gzip.compress(plain, 0))  # it has all its space from the start
            urls.append({"url": f"{folder}/one.tar.gz", "nsamples": 3})
        (tmp_path / "all.json").write_text(
            json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": urls})
        )
        given = {"classes": 1, "cache_dir": tmp_path / "cache", "prefetch_shards": 0, "decoders": 1, **arguments}
        return images(tmp_path / "all.json", cache_gb=(n_shards + 0.5) * with_index(len(plain)) / GIB, **given)

    return open_


def reds(samples) -> list[int]:
    return [image[0, 0, 0].item() for image, _ in samples]


def test_a_sample_is_an_image_and_its_class(shards, images):
    data = images(shards)
    assert data.classes == ["even", "odd"]
    samples = data.__getitems__(range(40))
    assert sorted(reds(samples)) == list(range(40))
    assert [target for _, target in samples] == [red % 2 for red in reds(samples)]
    assert sum(data.shard_lengths) == len(data) == 40
    assert len(data.shard_lengths) > 3


def test_it_pickles_before_and_after_use(shards, images):
    data = images(shards)
    for _ in range(2):
        again = pickle.loads(pickle.dumps(data))
        assert reds(again.__getitems__([3, 30])) == reds(data.__getitems__([3, 30]))
        again.close()


def test_a_damaged_shard_is_replaced_by_the_next_one_and_counts_for_all_its_samples(shards, images):
    lengths = images(shards).shard_lengths
    tars = sorted(shards.parent.glob("*.tar"))
    tars[1].write_bytes(tars[1].read_bytes()[:1000])
    data = images(shards, max_bad_fraction=0.5)
    first = lengths[0]
    after = first + lengths[1]
    good = reds(data.__getitems__(range(after, after + 1)))
    assert reds(data.__getitems__(range(first, after))) == good * lengths[1]
    assert list(data.bad_counts.values()) == [lengths[1]]
    assert tars[1].name in next(iter(data.bad))
    assert data.error_of(first + 1) == next(iter(data.bad.values()))
    assert data.stats()["bad_samples"] == lengths[1]


def test_a_bad_sample_has_one_name_and_its_reason_also_when_its_shard_was_read_to_its_end(cached):
    data = cached(2, damaged=(2,), max_bad_fraction=0.5)
    data.expect(range(9))
    data.__getitems__(range(3))
    (name, reason) = next(iter(data.bad.items()))
    assert name == data.name(2) == data.sample_id(2)
    assert "one.tar.gz/" in name
    assert "[" not in name
    assert data.error_of(2) == reason
    assert "image" in reason
    assert data.error_of(1) == ""


def test_too_many_lost_fail_and_name_the_shard(shards, images):
    lengths = images(shards).shard_lengths
    tar = sorted(shards.parent.glob("*.tar"))[2]
    tar.unlink()
    data = images(shards, max_bad_fraction=0.05)
    with pytest.raises(ValueError, match=rf"{lengths[2]} of 40 samples.*allows 2: .*{tar.name}"):
        data.__getitems__(range(40))


@pytest.mark.parametrize(
    ("number", "said"), [(errno.EACCES, r"\.tar on .*: Permission denied"), (errno.ELOOP, "there is no shard")]
)
def test_a_shard_that_may_not_be_read_is_lost_also_as_the_first_one(shards, images, monkeypatch, number, said):
    data = images(shards, max_bad_fraction=0.5)
    tar, opened = str(sorted(shards.parent.glob("*.tar"))[0]), os.open

    def refuse(path, *flags, **more):
        if str(path) == tar:
            raise OSError(number, os.strerror(number), tar)
        return opened(path, *flags, **more)

    monkeypatch.setattr(os, "open", refuse)
    data[0]
    assert list(data.bad_counts.values()) == [data.shard_lengths[0]]
    assert re.search(said, next(iter(data.bad.values())))


def test_no_secret_of_a_shard_or_an_index_is_said(images, monkeypatch):
    index = "https://me:secret@host/index.json?token=secret"
    found = read_index([{"url": "https://me:secret@host/a.tar?token=secret", "nsamples": 2}])
    monkeypatch.setattr("ddp_hydra.data.wids.read_index", lambda *_, **__: found)
    with pytest.raises(ValueError, match=r"https://host/index\.json does not say which classes"):
        images(index)
    data = images(index, classes=2, max_bad_fraction=1.0)
    monkeypatch.setattr(data.shards, "fields", lambda _: bytes(-1))
    with pytest.raises(ValueError, match="can be decoded"):
        data[0]
    assert list(data.bad) == ["https://host/a.tar"]
    assert data.where() == "https://host/index.json"


def write(folder: Path, samples: list[dict[str, bytes]], **info) -> Path:
    """Write one shard and its index."""
    with tarfile.open(folder / "one.tar", "w") as tar:
        for number, sample in enumerate(samples):
            for extension, content in sample.items():
                member = tarfile.TarInfo(f"{number:03}{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    index = {"__kind__": "wids-shard-index-v1", "wids_version": 1}
    index["shardlist"] = [{"url": "one.tar", "nsamples": len(samples)}]
    (folder / "index.json").write_text(json.dumps(index | ({"info": info} if info else {})))
    return folder / "index.json"


def test_samples_without_image_or_label_are_replaced_and_named(tmp_path, png, images):
    good = [{".png": png(red=number), ".cls": b"1"} for number in range(6)]
    odd = [
        {".txt": b"no image", ".cls": b"1"},
        {".png": png()},
        {".png": png(), ".cls": b"9"},
        {".png": b"x", ".cls": b"0"},
    ]
    data = images(write(tmp_path, odd + good), classes=["a", "b"], max_bad_fraction=0.5)
    assert reds(data.__getitems__([0])) == [0]
    reasons = " ".join(data.bad.values())
    for words in (
        "no field with an image, only .txt, .cls",
        "no field .cls, only .png",
        "its class is 9",
        "not an image",
    ):
        assert words in reasons
    assert len(data.bad) == 4


def test_classes_come_from_the_index_or_are_given(tmp_path, png, images):
    index = write(tmp_path, [{".jpg": png(), ".label": b" 2\n"}], classes=["a", "b", "c"])
    assert images(index, label=".label")[0][1] == 2
    index = write(tmp_path, [{".jpg": png(), ".cls": b"2"}])
    assert images(index, classes=7).classes == list("0123456")
    assert images(index, classes=np.int64(3)).classes == list("012")
    with pytest.raises(ValueError, match=r"info\.classes.*data\.classes="):
        images(index)


def test_classes_in_a_dict_have_its_numbers(tmp_path, png, images):
    sample = {".jpg": png(), ".cls": b"2"}
    data = images(write(tmp_path, [sample], classes={"b": 1, "a": 0, "c": 2}))
    assert (data.classes, data.class_to_idx) == (["a", "b", "c"], {"a": 0, "b": 1, "c": 2})
    told = r"2 classes the numbers .*, and they go from 0 to 1: type data\.classes="
    with pytest.raises(ValueError, match=rf"index\.json \(info\.classes\) gives {told}"):
        images(write(tmp_path, [sample], classes={"a": 1, "b": 2}))
    with pytest.raises(ValueError, match=rf"^data\.classes gives {told}"):
        images(write(tmp_path, [sample]), classes={"a": 1, "b": 2})
    assert images(write(tmp_path, [sample], classes={"0": "cat", "1": "dog"})).classes == ["cat", "dog"]


@pytest.mark.parametrize("error", [StaleCredentialsError("expired"), PermissionError("403 from the start")])
def test_no_access_is_no_lost_shard(shards, images, monkeypatch, error):
    data = images(shards, max_bad_fraction=0.5)

    def refuse(index):
        raise error

    monkeypatch.setattr(data.shards, "fields", refuse)
    with pytest.raises(type(error), match=str(error)):
        data[0]
    assert data.bad == {}


# A small cache of shards


def test_images_that_are_kept_in_memory_keep_no_shard(cached):
    data = cached(1)
    for _ in range(2):
        assert reds(data.__getitems__(range(9))) == list(range(9))
    assert {type(value) for value in data._cache._values.values()} == {bytes}


def test_a_bad_image_keeps_no_shard(cached):
    data = cached(1, damaged=(1, 4, 7), max_bad_fraction=1.0, cache_mb=0)
    gc.disable()
    try:
        assert reds(data.__getitems__([0, 1, 2, 3, 4, 5, 6, 7, 8])) == [0, 2, 2, 3, 5, 5, 6, 8, 8]
    finally:
        gc.enable()


def test_the_class_of_an_image_in_memory_waits_for_no_image_that_is_to_be_decoded(cached):
    data = cached(1)
    data.__getitems__([0])
    data._cache._left = 0
    data.__getitems__([3])
    assert reds(data.__getitems__([0, 4, 5])) == [0, 4, 5]


def test_closing_ends_the_waiting_for_space(cached, tmp_path):
    data = cached(1)
    view = data.fetch(0)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(data.__getitem__, 3)
        wait_until((tmp_path / "cache" / "wanted").exists)
        data.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result()
    assert len(view)
