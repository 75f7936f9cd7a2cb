"""Tar files as tools write them and people pack them, by both readers. `tests/data/tars/make.sh` wrote the files."""

from __future__ import annotations

import gzip
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from webdataset import tariterators

from ddp_hydra.data import TarSamples
from ddp_hydra.data.images.batch_loader import TooManyBadSamplesError
from ddp_hydra.data.shards.write import write_index
from ddp_hydra.data.wids import WidsImages
from ddp_hydra.errors import ConfigError
from tests.support.tar_server import tar_of

pytestmark = pytest.mark.medium

TARS = Path(__file__).parents[2] / "data" / "tars"
WRITERS = [
    "gnu-v7.tar", "gnu-oldgnu.tar", "gnu-ustar.tar", "gnu-gnu.tar", "gnu-posix.tar", "gnu-gnu-long.tar", "gnu.tar.gz",
    "gnu-posix-long.tar", "bsd-ustar.tar", "bsd-pax.tar", "bsd-gnutar.tar", "bsd-v7.tar", "bsd-pax-long.tar",
    "python-ustar.tar", "python-gnu.tar", "python-pax.tar", "webdataset.tar",
]  # fmt: skip


def by_wids(path: Path, folder: Path, **arguments: Any) -> WidsImages:
    index = folder / "index.json"
    write_index([str(path)], str(index))
    return WidsImages(str(index), cache_dir=folder / "cache", classes=3, **arguments)


def by_stream(path: Path, **arguments: Any) -> TarSamples:
    return TarSamples(str(path), decode="torchrgb8", shuffle=False, **arguments)


def seen(samples: Any) -> list[tuple[int, int]]:
    return [(image[0, 0, 0].item(), label) for image, label in samples]


@pytest.mark.parametrize("name", WRITERS)
def test_what_each_tool_writes_is_read(name, tmp_path):
    images = by_wids(TARS / name, tmp_path)
    assert seen(images) == seen(by_stream(TARS / name)) == [(1, 0), (2, 1)]
    assert {key.rpartition("/")[0] for key in (images.name(0), images.name(1))} <= {
        str(TARS / name),
        f"{TARS / name}/train",
    }
    with (TARS / name).open("rb") as stream:
        files = tariterators.tar_file_expander([{"url": name, "stream": stream}])
        raw = [(sample["png"], sample["cls"]) for sample in tariterators.group_by_keys(files)]
    assert [image for image, _ in TarSamples(str(TARS / name), decode=None, shuffle=False)] == [
        image for image, _ in raw
    ]
    assert [bytes(images.fetch(number)) for number in range(2)] == [image for image, _ in raw]
    images.close()


def test_a_folder_with_leftovers_and_links(tmp_path):
    images = by_wids(TARS / "gnu-folder.tar", tmp_path)
    assert seen(images) == [(1, 0), (2, 1), (1, 0)]
    assert [images.name(number).rpartition("/./")[2] for number in range(3)] == ["train/001", "train/002", "train/003"]
    with pytest.raises(
        TooManyBadSamplesError, match=r"gnu-folder\.tar can't be read: \./train/003\.cls is a link: .*--dereference"
    ):
        seen(by_stream(TARS / "gnu-folder.tar"))


@pytest.mark.parametrize("name", ["gnu-sparse-gnu.tar", "gnu-sparse-posix.tar"])
def test_a_sparse_file_is_a_sentence(name, tmp_path):
    with pytest.raises(ValueError, match=rf"{name} holds train/002\.bin as a sparse file: write it anew without"):
        by_wids(TARS / name, tmp_path)
    fields = [
        len(sample[0]) for sample in TarSamples(str(TARS / name), ["bin"], None, shuffle=False, max_bad_fraction=1)
    ]
    assert fields == [2**20 + 3]


def test_a_tar_that_is_not_sorted_says_how_to_sort_it(tmp_path):
    words = (
        r"4 .*samples.* bad.*gnu-unsorted\.tar/train/001 \(it has no field .*tar --sort=name.*data\.max_bad_fraction"
    )
    with pytest.raises(ValueError, match=words):
        seen(by_stream(TARS / "gnu-unsorted.tar"))
    with pytest.raises(ValueError, match=r"gnu-unsorted\.tar/train/001 \(it has no field .*tar --sort=name"):
        seen(by_wids(TARS / "gnu-unsorted.tar", tmp_path))


def test_a_package_of_another_kind_says_what_to_do(tmp_path):
    assert seen(by_stream(TARS / "gnu.tar.xz")) == [(1, 0), (2, 1)]
    with pytest.raises(ValueError, match=r"gnu\.tar\.xz is compressed with xz: unpack it, or pack it with gzip"):
        by_wids(TARS / "gnu.tar.xz", tmp_path)
    (tmp_path / "a.tar").write_bytes(gzip.compress((TARS / "gnu-gnu.tar").read_bytes()))
    assert seen(by_stream(tmp_path / "a.tar")) == [(1, 0), (2, 1)]
    with pytest.raises(ValueError, match=r"a\.tar is compressed with gzip: name it \.tar\.gz"):
        by_wids(tmp_path / "a.tar", tmp_path)
    (tmp_path / "b.tar").touch()
    with pytest.raises(TooManyBadSamplesError, match=r"b\.tar can't be read: it is empty"):
        seen(by_stream(tmp_path / "b.tar"))
    for content in (b"PK\3\4" + bytes(600), b"\x28\xb5\x2f\xfd" + bytes(600), b"<html>", b"x" * 5000):
        (tmp_path / "b.tar").write_bytes(content)
        with pytest.raises(ValueError, match=r"b\.tar is (compressed with z\w+: unpack it|not a tar file|a damaged)"):
            by_wids(tmp_path / "b.tar", tmp_path)
        with pytest.raises(
            TooManyBadSamplesError,
            match=r"b\.tar can't be read: it is damaged, or no tar file, plain or packed by gzip",
        ):
            seen(by_stream(tmp_path / "b.tar"))


def test_img2dataset_s_folder(tmp_path):
    found = sorted(path.name for path in (TARS / "img2dataset").iterdir())
    assert found == ["00000.parquet", "00000.tar", "00000_stats.json"]
    tar = TARS / "img2dataset" / "00000.tar"
    samples = list(TarSamples(str(tar), ["jpg", "txt", "json"], "torchrgb8", shuffle=False))
    assert [(image.shape, text, data["key"]) for image, text, data in samples] == [
        ((3, 4, 4), "a cat", "000000000"),
        ((3, 4, 4), "a dog", "000000001"),
    ]
    images = by_wids(tar, tmp_path, label=None)
    assert [target for _, target in images] == [-1, -1]
    with pytest.raises(
        ValueError, match=r"000000000 \(it has no field \.cls, only \.jpg, \.json, \.txt .*data\.label="
    ):
        seen(by_wids(tar, tmp_path / "b"))


PNG = (TARS / "gnu-gnu.tar", "train/001.png")


@pytest.fixture
def tar(tmp_path):
    """Write a tar file. The content of images is given by their name."""
    with tarfile.open(PNG[0]) as file:
        member = file.extractfile(PNG[1])
        assert member is not None
        png = member.read()

    def write(members: dict[str, bytes | None] | list[tuple[str, bytes | None]]) -> Path:
        items = members.items() if isinstance(members, dict) else members
        path = tmp_path / "a.tar"
        path.write_bytes(tar_of([(name, png if content is None else content) for name, content in items]))
        return path

    return write


GOOD: dict[str, bytes | None] = {"001.png": None, "001.cls": b"0"}
BAD = {
    "a sample without a field": (
        {"002.png": None},
        r"a\.tar/002 \(it has no field \.?cls, only \.?png \(the files of a sample",
    ),
    "a word as class": (
        {"002.png": None, "002.cls": b"cat"},
        r"a\.tar/002 \(its field \.?cls holds 'cat', and must hold the number",
    ),
    "a class with a point": (
        {"002.png": None, "002.cls": b"1.0"},
        r"a\.tar/002 \(its field \.?cls holds '1\.0'",
    ),
    "two dots": (
        {"000.1.png": None, "000.1.cls": b"1"},
        r"a\.tar/000 \(it has no field .*begins at the first dot of a file's name: 000\.1\.jpg",
    ),
    "no image": (
        {"002.png": b"hello", "002.cls": b"1"},
        r"a\.tar/002 \((its field png can't be decoded: it is no image|not an image: .*hello)",
    ),
    "an image of nothing": (
        {"002.txt": b"text", "002.cls": b"1"},
        r"a\.tar/002 \(it has no field (with an image|png or jpg), only",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_sample_is_named_by_both(name, tar, tmp_path):
    members, words = BAD[name]
    path = tar(GOOD | members)
    fields = ["png;jpg", "cls"]
    for opened in (by_wids(path, tmp_path), by_stream(path, fields=fields)):
        with pytest.raises(
            ValueError, match=rf"1 of 2 samples .*bad, and data\.max_bad_fraction=0\.01 allows 0: .*{words}"
        ):
            seen(opened)
    stream = by_stream(path, fields=fields, max_bad_fraction=0.5)
    assert seen(stream) == [(1, 0)]
    assert (stream.stats()["bad_samples"], stream.stats()["samples"]) == (1, 2)
    assert next(iter(stream.bad)).startswith(str(path))
    assert seen(by_wids(path, tmp_path, max_bad_fraction=0.5)) == [(1, 0)] * 2  # replaced by its neighbour


@pytest.mark.parametrize(
    "members",
    [
        {"._001.png": b"\0\5\26\7", **GOOD, ".DS_Store": b"x", "__MACOSX/._001.png": b"", ".git/1.png": None},
        {"001.PNG": None, "001.CLS": b"0"},
        {**GOOD, "README": b"text", "LICENSE": b"text", "Thumbs.db": b"x"},
        {"a/b.c/001.png": None, "a/b.c/001.cls": b"0"},
        {"001.cls": b" 0\r\n", "001.png": None},
    ],
)  # fmt: skip
def test_leftovers_upper_case_and_blanks_are_read_alike(members, tar, tmp_path):
    path = tar(members)
    assert seen(by_wids(path, tmp_path)) == seen(by_stream(path)) == [(1, 0)]


@pytest.mark.parametrize("number", [b"2", b"-1"])
def test_a_class_out_of_range_is_a_bad_sample(number, tar, tmp_path):
    path = tar(GOOD | {"002.png": None, "002.cls": number})
    write_index([str(path)], str(tmp_path / "index.json"))
    for classes in (2, ["a", "b"], {"b": 1, "a": 0}, {1: "b", 0: "a"}):
        stream = by_stream(path, classes=classes)
        assert stream.classes == WidsImages(str(tmp_path / "index.json"), classes=classes).classes
        for opened in (stream, WidsImages(str(tmp_path / "index.json"), classes=classes)):
            with pytest.raises(
                ValueError, match=rf"a\.tar/002 \(its class is {int(number)}, and there are 2: check data\.cl"
            ):
                seen(opened)
    assert seen(by_stream(path)) == [(1, 0), (1, int(number))]


def test_two_samples_of_one_name_in_a_row_are_refused(tar, tmp_path):
    path = tar([*GOOD.items(), *GOOD.items()])
    for read in (lambda: by_wids(path, tmp_path), lambda: seen(by_stream(path))):
        with pytest.raises(ValueError, match=r"a\.tar.* 001\.png.* twice: give each sample a name of its own"):
            read()


@pytest.mark.parametrize("size", [1, 600, 1535, 1700, 2048 + 100, 3072 + 700])
def test_a_damaged_shard_is_never_a_shorter_one(size, tar, tmp_path):
    path = tar(
        {f"{number:03d}.{kind}": None if kind == "png" else b"0" for number in range(4) for kind in ("png", "cls")}
    )
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(TooManyBadSamplesError, match=r"a\.tar can't be read: it is damaged"):
        seen(by_stream(path))
    whole = bytearray(tar(GOOD | {"002.png": None, "002.cls": b"1"}).read_bytes())
    whole[2 * 1024 + 10] ^= 1  # in the header of the third member
    path.write_bytes(whole)
    with pytest.raises(
        TooManyBadSamplesError, match=r"it is damaged, or only the start of a tar file \(bad checksum\)"
    ):
        seen(by_stream(path))


@pytest.mark.parametrize(("n_samples", "buffer"), [(None, 0), (12, 0), (None, 4)])
def test_samples_of_a_damaged_shard_count_as_bad(n_samples, buffer, tar, tmp_path):
    """webdataset, too, goes on with the next shard."""
    urls = []
    for shard in range(3):
        path = tar({f"{shard}{number}.{kind}": b"%d" % number for number in range(5) for kind in ("cls", "txt")})
        urls.append(str(path.rename(tmp_path / f"{shard}.tar")))
    whole = bytearray(Path(urls[1]).read_bytes())
    whole[4 * 1024 + 10] ^= 1  # in the header of the third sample
    Path(urls[1]).write_bytes(whole)
    options = {"decode": None, "shuffle": False, "shuffle_buffer": buffer, "n_samples": n_samples}
    data = TarSamples(urls, ["__key__"], max_bad_fraction=0.3, **options)
    lost = 3 if n_samples else 4  # of 12 / 3 or 5; the second sample is not known to be whole
    for _ in range(2):
        assert sorted(int(key) for (key,) in data) == [0, 1, 2, 3, 4, 10, *range(20, 25)]
    assert data.bad == {urls[1]: "it is damaged, or only the start of a tar file (bad checksum)"}
    assert data.bad_counts == {urls[1]: lost}
    assert data.stats()["bad_samples"] == lost
    with pytest.raises(TooManyBadSamplesError, match=rf"1\.tar can't be read: it is damaged.* So {lost} of .* are bad"):
        list(TarSamples(urls, ["__key__"], max_bad_fraction=0, **options))


@pytest.mark.medium
def test_bad_samples_are_judged_over_a_pass(tar):
    members: dict[str, bytes | None] = {}
    for number in range(300):
        members |= {f"{number:03d}.png": None} | ({} if number == 5 else {f"{number:03d}.cls": b"0"})
    path = tar(members)
    stream = by_stream(path)
    assert len(seen(stream)) == 299
    assert len(seen(stream)) == 299  # the same sample again counts once
    assert stream.stats()["bad_samples"] == 1
    with pytest.raises(TooManyBadSamplesError, match=r"1 of 50 samples is bad.*allows 0"):
        [next(samples) for samples in [iter(by_stream(path, n_samples=50))] for _ in range(10)]
    part = by_stream(path, n_samples=400)
    part.world_size = 2  # 200 for this rank
    assert [next(samples) for samples in [iter(part)] for _ in range(10)]
    with pytest.raises(TooManyBadSamplesError, match=r"1 of 300 samples is bad.*allows 0"):
        seen(by_stream(path, max_bad_fraction=0.001))


def test_only_what_is_asked_for_is_decoded_and_errors_of_a_transform_are_the_user_s(tar):
    path = tar(GOOD | {"001.json": b"{", "001.pyd": b"no pickle"})
    assert seen(by_stream(path)) == [(1, 0)]

    def fails(_):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        seen(by_stream(path, transform=fails, max_bad_fraction=1))


def test_shards_and_fields_may_be_written_in_several_ways(tar, tmp_path):
    tar(GOOD).rename(tmp_path / "1.tar")
    tar(GOOD)
    for urls in (
        f"{tmp_path}/*.tar",
        f"{tmp_path}/[1a].tar",
        f"{tmp_path}/{{a,1}}.tar",
        [f"file://{tmp_path}/1.tar"] * 2,
    ):
        assert seen(TarSamples(urls, [".PNG;jpg", "CLS"], "torchrgb8")) == [(1, 0)] * 2
    path = tar({"001.png": None, "001.label": b"0"})
    assert [seen(by_wids(path, tmp_path, label=label)) for label in (".label", "label", ".LABEL")] == [[(1, 0)]] * 3
    tar(GOOD)
    key, target = next(iter(TarSamples(f"{tmp_path}/a.tar", ["__key__", "cls"])))
    assert (key, target) == ("001", 0)
    assert seen(TarSamples(f"pipe:cat {tmp_path}/a.tar", decode="torchrgb8")) == [(1, 0)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"urls": None}, r"no shards are given: type data\.urls=…, and data\.val_urls=…"),
        ({"urls": "/none/*.tar"}, r"no file is named /none/\*\.tar: check data\.urls="),
        ({"urls": "s3://bucket/a.tar"}, r"can't read s3://bucket/a\.tar: give data\.urls='pipe:aws s3 cp .*data=wids"),
        ({"urls": "a.tar", "decode": "rgbx"}, r"data\.decode=rgbx: give .*torchrgb8.*, or null"),
        ({"urls": "a.tar", "max_bad_fraction": 2}, r"data\.max_bad_fraction=2: give a share from 0 to 1"),
    ],
)
def test_mistakes_in_the_config_are_told(arguments, told):
    with pytest.raises(ConfigError, match=told):
        TarSamples(**arguments)


def test_a_shard_that_may_not_be_read_is_lost_as_a_missing_one(tmp_path, monkeypatch):
    (tmp_path / "loop.tar").symlink_to("loop.tar")
    with pytest.raises(TooManyBadSamplesError, match=r"loop\.tar can't be read: it is a link to itself"):
        seen(by_stream(tmp_path / "loop.tar"))

    def refuse(url):
        raise PermissionError(13, "Permission denied", url)

    monkeypatch.setattr(sys.modules["webdataset.gopen"], "gopen", refuse)
    with pytest.raises(TooManyBadSamplesError, match=r"a\.tar can't be read: Permission denied: check its rights"):
        seen(by_stream(tmp_path / "a.tar"))


def test_what_ends_a_stream_is_told(tar, tmp_path):
    with pytest.raises(TooManyBadSamplesError, match=rf"it is a folder: type data\.urls='{tmp_path}/\*\.tar'"):
        seen(by_stream(tmp_path))
    with pytest.raises(
        TooManyBadSamplesError, match=r"none\.tar can't be read: there is no such file: check data\.urls="
    ):
        seen(by_stream(tmp_path / "none.tar"))
    many = iter(by_stream(tar({f"{number:03d}.png": None for number in range(300)}), max_bad_fraction=0.5))
    with pytest.raises(TooManyBadSamplesError, match=r"100 of 1,000 samples"):  # in a row
        next(many)
    with pytest.raises(ConnectionError, match=r"pipe:exit 3 can't be read: its command ended with exit code 3"):
        seen(by_stream("pipe:exit 3"))
    path = tar(GOOD)
    with pytest.raises(TooManyBadSamplesError, match=r"it is damaged.* \(unexpected end of data\)"):
        seen(by_stream(f"pipe:head -c 700 {path}"))


def test_a_tar_or_a_folder_in_place_of_an_index_is_told(tar, tmp_path):
    path = tar(GOOD)
    with pytest.raises(
        ValueError, match=r"a\.tar is a tar file, .*index .*a\.tar --out index\.json, and then data\.index=index"
    ):
        WidsImages(str(path), classes=2)
    with pytest.raises(
        FileNotFoundError, match=rf"{tmp_path} is a folder: .*{tmp_path}/index\.json; check data\.index="
    ):
        WidsImages(str(tmp_path), classes=2)
