"""The commands that make shards and indexes."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from ddp_hydra.data.images.decode import decode
from ddp_hydra.data.shards.__main__ import main
from ddp_hydra.data.wids import WidsShards
from ddp_hydra.storage import Access
from tests.support.disk import files_up_to
from tests.support.tar_server import numbered, serving, tar_of


@pytest.fixture
def pictures(tmp_path, png):
    """A folder with 30 images of three classes; names repeat between them, one has dots."""
    for number, label in enumerate(["cat", "dog", "Übel"]):
        folder = tmp_path / "train" / label
        folder.mkdir(parents=True)
        for index in range(10):
            name = "a.b.c.PNG" if index == 9 else f"{index}.png"
            (folder / name).write_bytes(png(number * 50, index, 0))
        (folder / "notes.txt").write_text("no image")
    return tmp_path / "train"


def read_index(folder: Path) -> dict:
    return json.loads((folder / "index.json").read_bytes())


@pytest.mark.parametrize("origin", ["train", "out/index.json"])
def test_validation_shards_have_the_numbers_of_the_training(pictures, tmp_path, png, capsys, origin):
    assert main(["make", str(pictures), str(tmp_path / "out")]) == 0
    (tmp_path / "val" / "dog").mkdir(parents=True)
    (tmp_path / "val" / "dog" / "1.png").write_bytes(png(red=1))
    given = ["make", str(tmp_path / "val"), str(tmp_path / "val-out"), "--classes-from", str(tmp_path / origin)]
    assert main(given) == 0
    assert read_index(tmp_path / "val-out")["info"]["classes"] == ["cat", "dog", "Übel"]
    (sample,) = WidsShards(str(tmp_path / "val-out" / "index.json"))
    assert int(sample[".cls"]) == 1
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "cow")
    assert main([*given[:2], str(tmp_path / "other"), *given[3:]]) == 1
    assert "does not have: cow; it has: cat, dog, Übel: type another --classes-from" in capsys.readouterr().err


def test_classes_of_an_index_may_be_a_dict(pictures, tmp_path, capsys):
    given = ["make", str(pictures), str(tmp_path / "out"), "--classes-from", str(index := tmp_path / "index.json")]
    described = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 1}]}
    index.write_text(json.dumps({**described, "info": {"classes": {"dog": 2, "cat": 3}}}))
    assert main(given) == 1
    assert "(info.classes) gives 2 classes the numbers 2, 3, and they go from 0 to 1: type" in capsys.readouterr().err
    index.write_text(json.dumps({**described, "info": {"classes": {"dog": 1, "Übel": 2, "cat": 0}}}))
    assert main(given) == 0
    assert read_index(tmp_path / "out")["info"]["classes"] == ["cat", "dog", "Übel"]


def test_a_folder_becomes_shards_that_hold_every_image_once(pictures, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["make", str(pictures), str(out), "--shard-mb", "0.02"]) == 0
    index = read_index(out)
    names = [shard["url"] for shard in index["shardlist"]]
    assert names == [f"train-{number:06d}.tar" for number in range(len(names))]
    assert len(names) > 1
    for shard in index["shardlist"]:
        content = (out / shard["url"]).read_bytes()
        assert (len(content), hashlib.md5(content).hexdigest()) == (shard["filesize"], shard["md5sum"])
    assert sorted(path.name for path in out.iterdir()) == ["index.json", *names]

    data = WidsShards(str(out / "index.json"))
    assert data.info["classes"] == ["cat", "dog", "Übel"]
    seen = [(int(sample[".cls"]), decode(sample[".png"])[:2, 0, 0].tolist()) for sample in data]
    assert sorted(seen) == [(number, [number * 50, index]) for number in range(3) for index in range(10)]
    assert [number for number, _ in seen] != sorted(number for number, _ in seen)
    keys = [sample["__key__"] for sample in data]
    assert len(set(keys)) == 30
    assert sum(key.endswith("-a_b_c") for key in keys) == 3
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"30 samples in {len(names)} shards"
    assert told[0] == "skipped: 3 .txt"
    assert told[1] == "3 classes: cat, dog, Übel"
    assert len(told) == len(names) + 3
    sizes = [shard["filesize"] for shard in index["shardlist"]]
    assert all(0.02 * 2**20 <= size <= 0.02 * 2**20 + 20_000 for size in sizes[:-1])
    assert main(["make", str(pictures), str(out)]) == 1
    assert "holds an index.json already: remove it, or give another folder" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_bytes(pictures, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert main(["make", str(pictures), str(tmp_path / name), "--seed", str(seed), "--name", "x"]) == 0
    contents = [(tmp_path / name / "x-000000.tar").read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]


def test_a_run_that_fails_leaves_no_index(pictures, tmp_path, monkeypatch):
    out = tmp_path / "out"
    real = tarfile.TarFile.addfile

    def failing(tar, member, content):
        if (out / "train-000000.tar").exists():
            raise OSError("the disk is full")
        real(tar, member, content)

    monkeypatch.setattr(tarfile.TarFile, "addfile", failing)
    assert main(["make", str(pictures), str(out), "--shard-mb", "0.02"]) == 1
    assert [path.name for path in out.iterdir()] == ["train-000000.tar"]


def test_a_full_disk_is_named(pictures, tmp_path, capsys):
    with files_up_to(8192):
        assert main(["make", str(pictures), str(tmp_path / "out")]) == 1
    assert f"File too large: '{tmp_path}/out'" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["make", "{pictures}/cat", "{out}"],
            "<class>/<file>.jpg; skipped: 10 images outside a class folder",
        ),
        (["make", "{pictures}/none", "{out}"], "holds no images in class folders"),
        (["make", "{pictures}", "{out}", "--shard-mb", "0"], "type --shard-mb 128"),
        (["make", "{pictures}", "{out}", "--name", "../x"], "type --name train"),
        (["make", "{pictures}", "https://host/x"], "'https://host/x' can't be written to: give a folder, or s3://"),
        (["make", "gopher://bucket/x", "{out}"], "'gopher://bucket/x' can't be read"),
        (["index", "{pictures}/none.tar", "--out", "{out}/i.json"], "none.tar"),
        (["index", "{pictures}/cat/0.png", "--out", "{out}/i.json"], "is not a tar file, or a damaged one"),
        (["index", "{pictures}/none.tar.d/a.tar", "--out", "{out}/i.json"], "holds no samples"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(pictures, tmp_path, capsys, arguments, said):
    (pictures / "none.tar.d").mkdir()
    (pictures / "none.tar.d" / "a.tar").write_bytes(tar_of([("README", b"x")]))
    given = [argument.format(pictures=pictures, out=tmp_path / "out") for argument in arguments]
    assert main(given) == 1
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out" / "index.json").exists()


def test_shards_that_exist_get_an_index(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    tars = [tmp_path / "in" / f"{name}.tar" for name in "ab"]
    for number, path in enumerate(tars):
        path.write_bytes(numbered(10 * number, 10))
    out = tmp_path / "index.json"
    assert main(["index", *map(str, tars), "--out", str(tmp_path)]) == 1
    assert f"{tmp_path} is a folder: give the path of a file, such as {tmp_path.name}/index" in capsys.readouterr().err
    assert main(["index", *map(str, tars), "--out", str(out), "--name", "old"]) == 0
    index = json.loads(out.read_bytes())
    assert [(shard["url"], shard["nsamples"]) for shard in index["shardlist"]] == [("in/a.tar", 10), ("in/b.tar", 10)]
    assert index["name"] == "old"
    assert [int(sample[".cls"]) for sample in WidsShards(str(out))] == list(range(20))
    assert capsys.readouterr().out.endswith("20 samples in 2 shards\n")
    assert main(["index", str(tars[0]), "--out", str(tmp_path / "other" / "index.json")]) == 0
    assert len(WidsShards(str(tmp_path / "other" / "index.json"))) == 10


@pytest.mark.integration
def test_shards_on_a_web_server_get_an_index(tmp_path):
    with serving() as server:
        content = numbered(0, 10)
        server.add(a=content)
        out = tmp_path / "index.json"
        assert main(["index", f"{server.url}/a.tar", "--out", str(out)]) == 0
        (shard,) = json.loads(out.read_bytes())["shardlist"]
        assert shard == {
            "url": f"{server.url}/a.tar", "nsamples": 10, "filesize": len(content),
            "md5sum": hashlib.md5(content).hexdigest(),
        }  # fmt: skip
        assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


@pytest.mark.integration
def test_a_bucket_becomes_shards(s3, credentials, png, tmp_path):
    objects = {f"pets/train/{label}/{index}.png": png(index) for label in ("cat", "dog") for index in range(5)}
    bucket = s3.fill(objects)
    out = tmp_path / "out"
    assert main(["make", f"s3://{bucket}/pets/train/", str(out), "--endpoint-url", s3.endpoint_url]) == 0
    with tarfile.open(out / "train-000000.tar") as tar:
        assert len(tar.getnames()) == 20
    data = WidsShards(str(out / "index.json"))
    assert sorted((int(sample[".cls"]), int(decode(sample[".png"])[0, 0, 0])) for sample in data) == [
        (number, index) for number in range(2) for index in range(5)
    ]


@pytest.mark.integration
def test_shards_go_into_a_bucket(s3, credentials, pictures, tmp_path, capsys):
    bucket = s3.fill({"other": b"x"})
    command = ["make", str(pictures), f"s3://{bucket}/pets", "--endpoint-url", s3.endpoint_url]
    assert main(command) == 0
    data = WidsShards(f"s3://{bucket}/pets/index.json", access=Access(s3.endpoint_url), cache_dir=tmp_path / "cache")
    assert sorted(int(sample[".cls"]) for sample in data) == sorted(10 * [0, 1, 2])
    data.close()
    assert main(command) == 1
    assert "holds an index.json already" in capsys.readouterr().err
