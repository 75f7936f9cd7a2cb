"""The samples of wids shards: what they hold, in any order, from any place, in any process."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import resource
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch

from ddp_hydra.data.shards.cache_folder import with_index
from ddp_hydra.data.shards.tar_index import decode_field
from ddp_hydra.data.wids import WidsShards, field_of
from tests.support.shard_caches import total
from tests.support.tar_server import described, index_of, numbered, serving, tar_of


@pytest.fixture
def write(tmp_path):
    """Write shards and their index, and return its path: `write(a=(tar, samples), ...)`."""

    def write(**shards) -> str:
        for name, (content, _) in shards.items():
            (tmp_path / f"{name}.tar").write_bytes(content)
        listed = [described(f"{name}.tar", count, content) for name, (content, count) in shards.items()]
        (tmp_path / "index.json").write_bytes(index_of(*listed, name="pets", info={"classes": ["cat", "dog"]}))
        return str(tmp_path / "index.json")

    return write


@pytest.fixture
def three(write) -> str:
    """An index of shards with 100, 100 and 3 samples, of three kinds."""
    packed = [(f"compressed/{number:04d}.txt.gz", gzip.compress(f"text {number}".encode())) for number in range(1, 4)]
    return write(
        mp=(tar_of((f"{number:06d}.mp", msgpack.packb({"n": number})) for number in range(100)), 100),
        numbers=(numbered(0, 100), 100),
        compressed=(tar_of(packed), 3),
    )


@pytest.fixture
def server():
    with serving() as server:
        yield server


def test_every_sample_is_within_reach_in_any_order(three, tmp_path):
    data = WidsShards(three)
    fresh = pickle.dumps(data)
    assert (len(data), data.shard_lengths) == (203, [100, 100, 3])
    assert (data.name, data.info) == ("pets", {"classes": ["cat", "dog"]})
    assert data.key(201) == f"{tmp_path}/compressed.tar/compressed/0002"
    assert data[17] == {
        ".mp": msgpack.packb({"n": 17}), "__key__": "000017", "__dataset__": "pets", "__index__": 17,
        "__shard__": f"{tmp_path}/mp.tar", "__shardindex__": 17,
    }  # fmt: skip
    assert (data[190]["__key__"], int(data[190][".cls"]), data[190]["__shardindex__"]) == ("000090", 90, 90)
    assert (data[200]["__key__"], decode_field(".txt.gz", data[200][".txt.gz"])) == ("compressed/0001", "text 1")
    assert data[201]["__key__"] == "compressed/0002"
    assert data[0]["__key__"] == "000000"
    assert [sample["__index__"] for sample in data] == list(range(203))
    assert [data[index]["__index__"] for index in (-1, -203, np.int64(3))] == [202, 0, 3]
    for index in (203, -204):
        with pytest.raises(IndexError, match=f"sample {index} was asked for, and there are 203"):
            data[index]
    used = pickle.dumps(data)
    assert len(used) < 5000
    assert [int(pickle.loads(packed)[105][".cls"]) for packed in (fresh, used)] == [5, 5]


def test_shards_may_be_empty_or_elsewhere_than_the_index(write, tmp_path):
    index = write(a=(tar_of([]), 0), b=(numbered(0, 2), 2), c=(tar_of([]), 0), d=(numbered(2, 2), 2))
    assert [int(sample[".cls"]) for sample in WidsShards(index)] == [0, 1, 2, 3]
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("*.tar"):
        path.rename(tmp_path / "moved" / path.name)
    assert [int(sample[".cls"]) for sample in WidsShards(index, base=f"{tmp_path}/moved")] == [0, 1, 2, 3]
    with pytest.raises(FileNotFoundError, match=r"there is no shard .*data\.base="):
        WidsShards(index)[0]


def test_fields_are_parts_of_the_mapped_shard(three):
    data = WidsShards(three)
    fields = data.fields(105)
    assert sorted(fields) == [".bin", ".cls"]
    assert bytes(fields[".bin"]) == b"\5" * 50
    assert fields[".cls"].obj is data.fields(106)[".cls"].obj
    assert field_of(fields, {".cls"}) == b"5"
    assert field_of(fields, {".jpg"}) is None
    assert field_of({".seg.png": fields[".bin"]}, {".png"}) is fields[".bin"]
    assert field_of({".depth.png": fields[".cls"], ".png": fields[".bin"]}, {".png"}) is fields[".bin"]
    with pytest.raises(ValueError, match=r"images \.left\.png, \.right\.png, .*begins at a name's first dot"):
        field_of({".left.png": fields[".cls"], ".right.png": fields[".bin"]}, {".png"})


def test_shards_may_be_given_as_a_list(three, tmp_path, monkeypatch):
    shards = json.loads(Path(three).read_text())["shardlist"]
    data = WidsShards(shards, base=str(tmp_path))
    assert (len(data), data.shard_lengths, data.name, data.info) == (203, [100, 100, 3], "", {})
    assert int(data[150][".cls"]) == 50
    monkeypatch.chdir(tmp_path)
    first = WidsShards([{"url": "numbers.tar", "nsamples": 5}, {"url": "mp.tar", "nsamples": 2}])
    assert [sample["__key__"] for sample in first] == [f"{number:06d}" for number in (0, 1, 2, 3, 4, 0, 1)]
    with pytest.raises(ValueError, match="names no shards"):
        WidsShards([])
    with pytest.raises(ValueError, match="missing required field `nsamples`"):
        WidsShards([{"url": "numbers.tar"}])


def test_shards_may_be_given_as_the_content_of_an_index(three, tmp_path):
    data = WidsShards(json.loads(Path(three).read_text()), base=str(tmp_path))
    assert (len(data), data.name, data.info) == (203, "pets", {"classes": ["cat", "dog"]})
    assert int(data[150][".cls"]) == 50


def test_a_shard_without_a_named_data_set_above_it_may_name_its_own(tmp_path):
    listed = [{"url": "a.tar", "nsamples": 1, "dataset": "cats"}, {"url": "b.tar", "nsamples": 1}]
    (tmp_path / "a.tar").write_bytes(numbered(0, 1))
    (tmp_path / "b.tar").write_bytes(numbered(1, 1))
    data = WidsShards(listed, base=str(tmp_path))
    assert [sample.get("__dataset__") for sample in data] == ["cats", None]
    named = WidsShards(json.loads(index_of(*listed, name="pets")), base=str(tmp_path))
    assert [sample["__dataset__"] for sample in named] == ["pets", "pets"]


def test_an_index_may_be_open_for_reading(three, tmp_path):
    with Path(three).open() as text, Path(three).open("rb") as binary:
        for stream in (text, binary):
            data = WidsShards(stream, base=str(tmp_path))
            assert (len(data), data.name) == (203, "pets")
    with pytest.raises(ValueError, match="is not JSON"):
        WidsShards(io.StringIO("{"))


# What the fields mean


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("extension", "content", "expected"),
    [
        (".cls", b"12\n", 12),
        (".ID", b"-3", -3),
        (".txt", "ünicode".encode(), "ünicode"),
        (".json", b'{"a": [1, 2.5]}', {"a": [1, 2.5]}),
        (".mp", msgpack.packb([1, "a"]), [1, "a"]),
        (".msgpack", msgpack.packb({"a": b"1"}), {"a": b"1"}),
        (".txt.gz", gzip.compress(b"text", mtime=0), "text"),
        (".meta.json.GZ", gzip.compress(b"[1]", mtime=0), [1]),
        (".gz", gzip.compress(b"text", mtime=0), b"text"),
        (".unknown", b"text", b"text"),
        (".a.b.c", b"text", b"text"),
    ],
)
def test_a_field_is_decoded_by_its_extension(extension, content, expected):
    assert decode_field(extension, memoryview(content)) == expected


def test_arrays_and_images_are_decoded(png):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(decode_field(".npy", memoryview(npy(array))), array)
    for extension in (".png", ".seg.PNG", ".jpg"):  # told by the content
        image = decode_field(extension, memoryview(png(10, 20, 30)))
        assert image.shape == (3, 8, 8)
        assert image.dtype == torch.uint8
        assert image[:, 0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("extension", "content"),
    [
        (".cls", b"cat"), (".txt", b"\xff"), (".json", b"{"), (".json", b"[" * 100_000), (".npy", b"x"), (".npy", b""),
        (".mp", b"\xc1"), (".mp", b""), (".jpg", b"x"), (".pt", b""), (".pth", b"x"), (".pth", b"PK\3\4xxx"),
        (".safetensors", b"x"), (".safetensors", b""), (".txt.gz", b"x"),
        (".txt.gz", gzip.compress(b"text", mtime=0)[:-4]),
        (".npy", npy(np.array([{}], dtype=object))),
    ],
)  # fmt: skip
def test_a_damaged_field_is_a_value_error(extension, content):
    with pytest.raises(ValueError, match=rf"\{extension} can't be decoded"):
        decode_field(extension, memoryview(content))


@pytest.mark.parametrize("extension", [".pt", ".PTH", ".emb.pth.gz", ".safetensors"])
def test_tensors_are_decoded(extension):
    tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.zeros(0)}
    file = io.BytesIO()
    if extension == ".safetensors":
        file.write(pytest.importorskip("safetensors.torch").save(tensors))
    else:
        torch.save(tensors, file)
    content = gzip.compress(file.getvalue()) if extension.endswith(".gz") else file.getvalue()
    found = decode_field(extension, memoryview(content))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_safetensors_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"\.safetensors needs safetensors: type `pip install safetensors`"):
        decode_field(".safetensors", memoryview(b""))


@pytest.mark.parametrize("extension", [".pkl", ".pickle", ".pyd", ".pkl.gz", ".pt", ".PTH"])
def test_pickles_are_refused(extension):
    class Boom:
        def __reduce__(self):
            return os._exit, (3,)

    why = rf"\{extension} .*(pickled objects.*\.npy|more than tensors).* WidsShards\(\.\.\.\)\.fields\(index\)"
    with pytest.raises(ValueError, match=why):
        decode_field(extension, memoryview(pickle.dumps(Boom(), 2)))


# Damaged shards


def test_a_damaged_shard_says_its_name_each_time_and_harms_no_other(write, tmp_path):
    path = write(a=(numbered(0, 20), 20), b=(numbered(20, 20), 20))
    damaged = bytearray((tmp_path / "b.tar").read_bytes())
    damaged[1024] ^= 1
    (tmp_path / "b.tar").write_bytes(damaged)
    data = WidsShards(path)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"b\.tar is a damaged tar file"):
            data[25]
    assert int(data[5][".cls"]) == 5


# In other processes and threads


def test_more_shards_than_files_that_may_be_open(write, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (60, 60))
    data = WidsShards(write(**{f"s{number}": (numbered(10 * number, 2), 2) for number in range(40)}))
    before = len(list(Path("/proc/self/fd").iterdir()))
    found, most = [], 0
    for sample in data:
        found.append(int(sample[".cls"]))
        most = max(most, len(list(Path("/proc/self/fd").iterdir())) - before)
    assert found == [10 * number + inner for number in range(40) for inner in (0, 1)]
    assert 0 < most <= 31
    data.close()


# From elsewhere


@pytest.fixture
def remote(server, tmp_path):
    """Four shards of 20 samples behind HTTP; `remote(**options)` makes the data set."""
    contents = {name: numbered(20 * number, 20) for number, name in enumerate("abcd")}
    server.add(**contents)
    listed = [described(f"{name}.tar", 20, content) for name, content in contents.items()]
    server.files["/index.json"] = index_of(*listed, name="pets")
    made = []

    def make(**options) -> WidsShards:
        data = WidsShards(f"{server.url}/index.json", cache_dir=tmp_path / "cache", **options)
        made.append(data)
        return data

    yield make
    for data in made:
        data.close()


@pytest.mark.integration
def test_shards_come_over_http(remote, server):
    data = remote()
    assert [int(data[index][".cls"]) for index in (0, 45, 79)] == [0, 45, 79]
    assert data[45]["__shard__"] == f"{server.url}/c.tar"
    stats = data.stats()
    assert (stats["downloads"], stats["cache_misses"], stats["cache_hits"]) == (3, 3, 0)
    assert stats["bytes"] == sum(len(server.files[f"/{name}.tar"]) for name in "acd")
    assert stats["waited_s"] > 0
    again = remote()
    assert int(again[45][".cls"]) == 45
    assert (again.stats()["cache_hits"], server.gets("/c.tar")) == (1, 1)


@pytest.mark.integration
def test_shards_that_are_not_needed_any_more_are_evicted(remote, server, tmp_path):
    size = len(server.files["/a.tar"])
    data = remote(cache_gb=2.5 * size / 2**30, prefetch_shards=1)
    for _ in range(2):
        data.expect(range(80))
        assert [int(bytes(data.fields(index)[".cls"])) for index in range(80)] == list(range(80))
    assert total(tmp_path / "cache") <= 2.5 * size
    # Seven if each download ends before the next shard is needed; by sample it would be 160.
    assert data.stats()["downloads"] <= 10


@pytest.mark.integration
def test_a_shard_is_done_with_when_all_that_was_expected_of_it_was_read(remote, server):
    data = remote(cache_gb=2.5 * with_index(len(server.files["/a.tar"])) / 2**30, prefetch_shards=0)
    data.expect([*range(10), *range(20, 30)])
    for index in range(9):
        for _ in range(2):  # as for the image and for its class
            data.fields(index)
    assert 0 in data._cache.held
    data.fields(12)
    data.fields(-71)
    assert 0 not in data._cache.held
    data.expect([])
    data.expect([3, 3, 3, -1])
    assert int(data[3][".cls"]) == 3
