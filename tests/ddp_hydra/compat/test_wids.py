"""wids' public test cases, written anew against `compat.wids`, and what its users rely on beside them.

Refused on purpose, or not there:
- `localname=` and `default_localname`: files of the cache have names of their own, so that data sets can share them,
  and each is whole and checked. `cache_dir=` says where they are.
- `LRUShards`, `IndexedTarSamples`, `MMIndexedTar` and `get_shard`: insides of wids. Open shards are mapped into memory,
  so no number of them has to be bounded: `lru_size` changes nothing, and `get_stats` counts downloads as misses.
- `.pkl` and `.pickle` fields, and `.pth` with more than tensors and plain values: reading them could run any program.
- An index with more samples than a shard has is an error when the shard is opened. Fewer are the first ones.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from PIL import Image

from ddp_hydra.compat import wids
from ddp_hydra.compat.wids.__main__ import expanded, main
from ddp_hydra.data.batch import make_batch
from ddp_hydra.data.samplers import Distributed
from tests.support.tar_server import numbered, tar_of


def png(color: tuple[int, ...], mode: str = "RGB", format_: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (6, 4), color).save(file, format_)
    return file.getvalue()


@pytest.fixture
def shards(tmp_path, monkeypatch) -> list[dict]:
    """Three shards of 100, 100 and 3 samples, as in wids' tests, in the working folder."""
    monkeypatch.chdir(tmp_path)
    packed = [(f"compressed/{number:04d}.txt.gz", gzip.compress(f"text {number}".encode())) for number in range(1, 4)]
    contents = {
        "mpdata.tar": tar_of((f"{number:06d}.mp", msgpack.packb({"n": number})) for number in range(100)),
        "tendata.tar": numbered(0, 100),
        "compressed.tar": tar_of(packed),
    }
    for name, content in contents.items():
        Path(name).write_bytes(content)
    return [{"url": name, "nsamples": count} for name, count in zip(contents, (100, 100, 3), strict=True)]


@pytest.fixture
def write(tmp_path):
    """Write a shard of one sample with the given fields, and return the data set."""

    def write(fields: dict[str, bytes], **options) -> wids.ShardListDataset:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.tar"
        path.write_bytes(tar_of((f"a{extension}", content) for extension, content in fields.items()))
        return wids.ShardListDataset([{"url": str(path), "nsamples": 1}], **options)

    return write


# -- the data set ----------------------------------------------------------------------------------------------


def test_what_a_transformation_draws_depends_on_no_batch_size(shards):
    data = wids.ShardListDataset(shards[1:2], transformations=lambda sample: torch.rand(()).item())
    drawn = [
        torch.cat([make_batch(data, indices, seeded=True) for indices in sampler.batches(0)]).tolist()
        for sampler in (Distributed(len(data), size, shuffle=False) for size in (1, 4, 25))
    ]
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0])) == 100


def test_samples_are_found_in_all_shards(shards):
    data = wids.ShardListDataset(shards, lru_size=2)
    assert (len(data), len(data.shards), data.lengths) == (203, 3, [100, 100, 3])
    assert (data.cum_lengths.tolist(), data.total_length) == ([100, 200, 203], 203)
    with pytest.raises(TypeError, match=r"localname is not taken.*cache_dir=<folder>"):
        wids.ShardListDataset(shards, localname=str)
    found = {17: ("000017", ".mp"), 190: ("000090", ".bin"), 200: ("compressed/0001", ".txt.gz"), 0: ("000000", ".mp")}
    for index, (key, field) in found.items():
        sample = data[index]
        assert (sample["__key__"], field in sample, sample["__index__"]) == (key, True, index)
    assert data[17][".mp"] == {"n": 17}
    assert data[200][".txt.gz"] == "text 1"
    assert data[150]["__shardindex__"] == 50
    assert data[150]["__shard__"].endswith("/tendata.tar")
    assert data.get_stats() == (8, 0)
    assert pickle.loads(pickle.dumps(data))[103][".cls"] == 3
    data.close()


def test_an_index_may_be_a_path_or_an_open_file(shards, tmp_path):
    index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": "train", "shardlist": shards}
    Path("index.json").write_text(json.dumps(index))
    for given in (str(tmp_path / "index.json"), io.StringIO(json.dumps(index))):
        data = wids.ShardListDataset(given)
        assert (len(data), data.dataset_name) == (203, "train")
        assert data[120][".cls"] == 20


def test_images_are_those_of_pil_and_classes_are_numbers(write):
    sample = write({".jpg": png((200, 0, 0), format_="JPEG"), ".png": png((7,), "L"), ".cls": b"12"})[0]
    assert isinstance(sample[".jpg"], Image.Image)
    assert (sample[".jpg"].mode, sample[".jpg"].size, sample[".png"].mode) == ("RGB", (6, 4), "L")
    assert sample[".cls"] == 12
    image = write({".png": png((1, 2, 3))}, transformations="numpy")[0][".png"]
    assert (image.shape, image[0, 0].tolist()) == ((4, 6, 3), [1, 2, 3])


def test_other_fields_are_decoded_by_their_extensions(write):
    array, tensors = np.arange(3), {"w": torch.ones(2)}
    files = {}
    for name, save in ((".npy", lambda file: np.save(file, array)), (".pth", lambda file: torch.save(tensors, file))):
        file = io.BytesIO()
        save(file)
        files[name] = file.getvalue()
    sample = write({".txt": b"text", ".json": b"[1]", ".other": b"raw", **files})[0]
    assert (sample[".txt"], sample[".json"], sample[".other"].read()) == ("text", [1], b"raw")
    assert sample[".npy"].tolist() == [0, 1, 2]
    assert torch.equal(sample[".pth"]["w"], tensors["w"])


def test_transforms_follow_each_other(write):
    data = write({".cls": b"3"}).add_transform(lambda sample: sample[".cls"] + 1).add_transform(str)
    assert data[0] == "4"
    assert write({".cls": b"3"}, transformations=[lambda sample: sample[".cls"].read()])[0] == b"3"
    with pytest.raises(ValueError, match=r"a transformation is 'JPEG', and must be 'PIL', 'numpy' or a function"):
        write({".cls": b"3"}, transformations="JPEG")


def test_pickles_are_refused_and_can_be_had_as_bytes(write):
    fields = {".pkl": pickle.dumps([1])}
    with pytest.raises(ValueError, match=r"\.pkl holds pickled objects"):
        write(fields)[0]
    assert write(fields, transformations=[lambda sample: sample[".pkl"].read()])[0] == fields[".pkl"]


# -- samplers --------------------------------------------------------------------------------------------------

DATA = range(10_000)


def test_a_sharded_sampler_has_the_ranges_of_the_shards(shards):
    sampler = wids.ShardedSampler(wids.ShardListDataset(shards))
    assert sampler.ranges == [(0, 100), (100, 200), (200, 203)]
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(203))
    assert first != second
    assert sorted(first[:100]) == list(range(100))  # the first pass keeps the order of the shards
    assert len(sampler) == 203


def chunked(**options) -> wids.ChunkedSampler:
    return wids.ChunkedSampler(DATA, **{"num_samples": 5000, "chunksize": 1000, "shuffle": True, **options})


def test_the_epoch_can_be_set_and_grows_by_itself():
    sampler = chunked()
    assert sampler.ranges == [(0, 1000), (1000, 2000), (2000, 3000), (3000, 4000), (4000, 5000)]
    assert (sampler.seed, sampler.shuffle, sampler.shufflefirst, len(sampler)) == (0, True, False, 5000)
    first = list(sampler)
    assert sampler.epoch == 1
    assert list(sampler) != first
    sampler.set_epoch(0)
    random.seed(5)
    assert list(sampler) == first


def test_chunks_and_samples_are_shuffled():
    first = list(chunked())
    assert first != list(range(5000))
    assert sorted(first) == list(range(5000))
    assert [sorted(first[start : start + 1000]) for start in range(0, 5000, 1000)] == [
        list(range(start, start + 1000)) for start in range(0, 5000, 1000)
    ]
    assert {index // 1000 for index in list(chunked(shufflefirst=True, seed=1))[:1000]} != {0}
    assert list(chunked(shuffle=False)) == list(range(5000))
    assert list(wids.ChunkedSampler(DATA)) == list(DATA)
    assert set(chunked(num_samples=(1111, 2222))) == set(range(1111, 2222))
    assert set(chunked(num_samples=[1111, 2222])) == set(range(1111, 2222))
    with pytest.raises(ValueError, match=r"num_samples=0 and"):
        chunked(num_samples=0)
    with pytest.raises(ValueError, match="the data set has 10,000 samples"):
        chunked(num_samples=(9000, 10_001))


@pytest.fixture
def as_rank(monkeypatch):
    """Let this process be a rank: `as_rank(rank, world_size)`."""

    def as_rank(rank: int, world_size: int) -> None:
        for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", world_size)):
            monkeypatch.setattr(torch.distributed, name, lambda value=value: value)

    return as_rank


def test_ranks_have_disjoint_parts(as_rank):
    parts = []
    for rank in (0, 1):
        as_rank(rank, 2)
        sampler = wids.DistributedChunkedSampler(DATA, num_samples=5000, chunksize=1000, shuffle=True)
        assert sampler.ranges[-1] == (2500 * rank + 2000, 2500 * rank + 2500)
        parts.append(list(sampler))
        assert sorted(parts[rank]) == list(range(2500 * rank, 2500 * rank + 2500))
    assert not set(parts[0]) & set(parts[1])
    as_rank(0, 2)
    ordered = wids.DistributedChunkedSampler(DATA, num_samples=5000, chunksize=1000, shuffle=False)
    assert list(ordered) == list(range(2500))
    # All parts are equally long: a rank would wait for a step that another one does not make.
    lengths = [len(wids.DistributedChunkedSampler(DATA, num_replicas=7, rank=rank)) for rank in range(7)]
    assert lengths == [1428] * 7


def test_without_a_process_group_all_samples_are_one_part():
    assert sorted(wids.DistributedChunkedSampler(DATA, chunksize=1000)) == list(DATA)
    with pytest.raises(ValueError, match=r"rank=2, and must be from 0 to 1"):
        wids.DistributedChunkedSampler(DATA, num_replicas=2, rank=2)


# -- the cache folder ------------------------------------------------------------------------------------------


def test_the_newest_files_are_kept(tmp_path):
    for number in range(50):
        (tmp_path / f"file{number:03d}").write_bytes(b"x" * 73)
        stamp = 10**9 * (1_600_000_000 + number)
        os.utime(tmp_path / f"file{number:03d}", ns=(stamp, stamp))
    wids.keep_most_recent_files(f"{tmp_path}/*", maxsize=73 * 17 + 1, debug=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"file{number:03d}" for number in range(33, 50)]
    wids.keep_most_recent_files(f"{tmp_path}/*", maxfiles=2)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_bound_of_a_cache_folder_is_kept_by_the_data_set(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(wids, "_bounds", {})
    process = wids.create_cleanup_background_process(f"{tmp_path}/cache/*", maxsize=3e6, every=1)
    data = wids.ShardListDataset(shards, cache_dir="cache")
    assert data.data._cache.budget_bytes == 3_000_000
    assert wids.ShardListDataset(shards, cache_dir="cache", cache_size=5e6).data._cache.budget_bytes == 5_000_000
    assert wids.ShardListDataset(shards, 10, "other").data._cache.budget_bytes == 50 * 2**30
    assert process.is_alive()
    process.terminate()
    process.join()


# -- the commands ----------------------------------------------------------------------------------------------


def test_patterns_of_files():
    assert expanded("a.tar") == ["a.tar"]
    assert expanded("a-{008..010}.{x,y}") == [f"a-{number}.{end}" for number in ("008", "009", "010") for end in "xy"]
    with pytest.raises(ValueError, match=r"must have \{000\.\.009\}"):
        expanded("a-{b}")


def test_an_index_is_created_described_shown_and_changed(shards, tmp_path, capsysbinary):
    Path("info.txt").write_text("what it is")
    assert main(["create", "{tendata,mpdata}.tar", "-o", "index.json", "-n", "train", "-i", "info.txt"]) == 0
    index = json.loads(Path("index.json").read_text())
    assert [(shard["url"], shard["nsamples"]) for shard in index["shardlist"]] == [
        ("mpdata.tar", 100),
        ("tendata.tar", 100),
    ]
    assert (index["name"], index["info"], index["wids_version"]) == ("train", "what it is", 1)
    assert len(wids.ShardListDataset("index.json")) == 200
    capsysbinary.readouterr()
    assert main(["info", "index.json"]) == 0
    said = capsysbinary.readouterr().out
    assert b"samples: 200" in said
    assert b"what it is" in said
    assert main(["info", "-t", "index.json"]) == 0
    assert capsysbinary.readouterr().out.splitlines()[1].split(b"\t")[3] == b"200"
    assert main(["sample", "index.json", "150"]) == 0
    assert b".cls" in capsysbinary.readouterr().out
    assert main(["sample", "index.json", "150", "-c", ".cls"]) == 0
    assert capsysbinary.readouterr().out == b"50"
    assert main(["sample", "index.json", "150", "-c", ".jpg"]) == 1
    assert b"no field .jpg" in capsysbinary.readouterr().err
    assert main(["update", "index.json", "-n", "other", "-d", str(tmp_path)]) == 0
    changed = json.loads(Path("index.json").read_text())
    assert (changed["name"], changed["shardlist"][0]["url"]) == ("other", f"{tmp_path}/mpdata.tar")
    assert main(["update", "index.json", "--rebase"]) == 0
    changed = json.loads(Path("index.json").read_text())
    assert (changed["base"], changed["shardlist"][0]["url"]) == (str(tmp_path), "mpdata.tar")
    assert wids.ShardListDataset("index.json")[150][".cls"] == 50
    assert main(["info", "nothing.json"]) == 1
    assert b"nothing.json" in capsysbinary.readouterr().err
