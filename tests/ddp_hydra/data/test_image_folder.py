"""Images in a bucket: what is listed, what a sample is, and what every failure says."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from ddp_hydra.data.image_folder import S3ImageFolder
from ddp_hydra.data.names import is_of
from ddp_hydra.data.transforms import TrainTransform
from ddp_hydra.storage import Bucket
from ddp_hydra.storage.fsspec_store import FsspecStore
from tests.support.tar_server import described, index_of, numbered

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("credentials")]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(s3):
    """Open a bucket as an image folder, and close it after the test."""
    opened = []

    def open_(bucket, prefix="", **arguments):
        arguments = {"endpoint_url": s3.endpoint_url, **arguments}
        opened.append(S3ImageFolder(bucket, prefix, **arguments))
        return opened[-1]

    yield open_
    for dataset in opened:
        dataset.close()


@pytest.fixture
def pets(s3, png):
    """A bucket of two classes, with things between the images that are none."""
    return s3.fill(
        {
            "pets/dog/2.png": png(blue=20),
            "pets/dog/1.png": png(blue=10),
            "pets/cat/1.PNG": png(red=10),
            "pets/cat/notes.txt": b"not an image",
            "pets/cat/": b"",
            "pets/README": b"read me",
            "pets/top.png": png(),
            "petshop/bird/1.png": png(),
        }
    )


def test_the_class_is_the_folder_above_the_file(folder, pets):
    data = folder(pets, "pets")
    assert data.classes == ["cat", "dog"]
    assert data.class_to_idx == {"cat": 0, "dog": 1}
    assert data.samples == [("pets/cat/1.PNG", 0), ("pets/dog/1.png", 1), ("pets/dog/2.png", 1)]
    assert len(data) == len(list(data)) == 3
    assert folder(pets, "/pets/").samples == data.samples
    assert data.skipped == {".txt": 1, "": 1, "images outside a class folder": 1}
    assert (data[2][0].shape, data[2][0].dtype, data[2][0][:, 0, 0].tolist()) == ((3, 8, 8), torch.uint8, [0, 0, 20])


def test_a_batch_comes_in_the_order_that_was_asked(folder, pets):
    samples = folder(pets, "pets").__getitems__([2, 0, 1, 0])
    assert [(image.amax().item(), target) for image, target in samples] == [
        (20, 1),
        (10, 0),
        (10, 1),
        (10, 0),
    ]


def test_no_password_of_its_url_is_said(monkeypatch):
    monkeypatch.setattr(FsspecStore, "objects", lambda *_: iter([("train/a/1.png", 9)]))
    data = S3ImageFolder("sftp://me:secret@host/photos", "train")
    assert data.where() == "sftp://me@host/photos/train"
    data.close()


def test_val_has_the_numbers_of_train_even_where_a_class_is_missing(folder, s3, png):
    bucket = s3.fill({"train/a/1.png": png(), "train/b/1.png": png(), "val/b/1.png": png()})
    val = folder(bucket, "val", classes_from="train")
    assert val.classes == ["a", "b"]
    assert val.samples == [("val/b/1.png", 1)]


def test_prepare_normalises_and_keeps_the_memory_format(folder, pets):
    data = folder(pets, "pets", mean=(0.5, 0.0, 0.0), std=(0.25, 1.0, 0.5))
    images, targets = default_collate(data.__getitems__([0, 2]))
    images = images.contiguous(memory_format=torch.channels_last)
    x, y = data.prepare((images, targets))
    assert x.dtype == torch.float32
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(x[0, :, 0, 0], torch.tensor([(10 / 255 - 0.5) / 0.25, 0.0, 0.0]))
    assert torch.allclose(x[1, :, 0, 0], torch.tensor([-2.0, 0.0, 20 / 255 / 0.5]))
    assert torch.equal(y, targets)
    assert images.dtype == torch.uint8


def test_an_image_is_fetched_once_while_the_cache_has_room(folder, s3, png):
    bucket = s3.fill({f"a/{number}.png": png(red=number) for number in range(3)})
    data = folder(bucket, cache_mb=1)
    before = data.__getitems__([0, 1, 2])
    for number in range(3):
        s3.delete(bucket, f"a/{number}.png")
    assert all(torch.equal(a[0], b[0]) for a, b in zip(before, data.__getitems__([0, 1, 2]), strict=True))


def test_large_images_are_cached_as_files_within_the_budget(folder, s3, png):
    file = png(red=1, size=200)
    bucket = s3.fill({f"a/{number}.png": file for number in range(4)})
    data = folder(bucket, cache_mb=2.5 * len(file) / 2**20)
    data.__getitems__([0])
    data.__getitems__([1])
    data.__getitems__([2])
    assert [data._cache.get(number) is None for number in range(4)] == [False, False, True, True]
    assert bytes(data._cache.get(0)) == file


def test_it_pickles_small_before_and_after_use_and_reads_again(folder, png, tmp_path):
    for number in range(600):
        path = tmp_path / "train" / f"class-{number % 3}" / f"{number:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(red=number % 256))
    data = folder(f"file://{tmp_path}", "train", endpoint_url=None)
    data.set_epoch(3)
    data.__getitems__([0, 1, 2])
    packed = pickle.dumps(data)
    assert len(packed) < 600 * 25
    again = pickle.loads(packed)
    assert again.samples == data.samples
    assert again.classes == data.classes
    assert torch.equal(again[5][0], data[5][0])
    again.close()


def test_reading_from_many_threads_at_once_gives_each_its_own(folder, s3, png):
    bucket = s3.fill({f"a/{number:03}.png": png(red=number) for number in range(60)})
    data = folder(bucket, threads=4)
    wrong = []

    def read():
        for index, (image, _) in enumerate(data.__getitems__(list(range(60)))):
            if image[0, 0, 0].item() != index:
                wrong.append(index)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_closing_leaves_no_thread_and_reading_after_it_starts_anew(folder, pets):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    data = folder(pets, "pets", transform=TrainTransform(16))
    data.__getitems__([0])
    data.close()
    assert torch.get_num_threads() == 2  # those of the reader are its own
    torch.set_num_threads(before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("images")]
    assert data[0][1] == 0


def test_an_empty_prefix_names_the_folders_that_are_there(folder, pets):
    with pytest.raises(
        FileNotFoundError, match=r"s3://bucket-0/training; the folders .* are: pets, petshop.*train_prefix="
    ):
        folder(pets, "training")
    with pytest.raises(FileNotFoundError, match=r"the folders in s3://bucket-0/pets are: cat, dog"):
        folder(pets, "pets/cats")


def test_a_bucket_without_images_says_what_it_holds_instead(folder, s3):
    with pytest.raises(FileNotFoundError, match=r"no bucket 'no-such-bucket' at http://127.*data\.bucket="):
        folder("no-such-bucket")
    with pytest.raises(FileNotFoundError, match=r"nothing under s3://bucket-0/.*data\.bucket"):
        folder(s3.fill({}))
    bucket = s3.fill({"t/a/1.txt": b"x", "t/a/2.txt": b"x", "t/b/3.csv": b"x"})
    with pytest.raises(FileNotFoundError, match=r"no images .* only: 2 \.txt, 1 \.csv"):
        folder(bucket, "t")


def test_an_unreachable_endpoint_is_told(folder):
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1.*not reachable \(.*refused.*data\.endpoint_url="):
        folder("any-bucket", endpoint_url="http://127.0.0.1:9", retry_timeout_s=0.3)


def test_wrong_credentials_are_told_and_not_shown(folder, pets, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key")
    with pytest.raises(
        PermissionError, match=r"refused the credentials of the environment.*InvalidAccessKeyId"
    ) as error:
        folder(pets, "pets")
    assert "data.anon=true" in str(error.value)
    assert "another-key" not in str(error.value)
    assert "testing-secret" not in str(error.value)


def test_no_credentials_say_what_to_set(folder, pets, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # Where a machine's role would be asked for; nobody listens there.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(PermissionError, match=r"no credentials were found.*AWS_ACCESS_KEY_ID.*data\.anon=true"):
        folder(pets, "pets")


def test_a_public_bucket_needs_no_credentials(folder, s3, pets, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PermissionError, match=r"a reader without credentials \(data\.anon=true\)"):
        folder(pets, "pets", anon=True).__getitems__([0])
    s3.publish(pets)
    assert folder(pets, "pets", anon=True)[0][1] == 0


def test_an_unknown_profile_is_told(folder, pets, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(PermissionError, match=r"nobody.*AWS_PROFILE"):
        folder(pets, "pets")


def test_a_given_endpoint_wins_over_the_environment_and_over_a_proxy(folder, s3, pets, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    assert len(folder(pets, "pets", endpoint_url=None)) == 3
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert len(folder(pets, "pets")) == 3


@pytest.mark.parametrize(
    ("arguments", "typed"),
    [
        (
            {"bucket": "s3://pets/train"},
            r"is a folder in a bucket: type data\.bucket=s3://pets data\.train_prefix=",
        ),
        ({"bucket": "_pets"}, r"'_pets' is not the name of a bucket.*data\.bucket="),
        (
            {"bucket": "pets", "endpoint_url": "localhost:9000"},
            r"'localhost:9000'.*data\.endpoint_url=http://",
        ),
        ({"bucket": None}, r"no bucket is given.*data\.bucket="),
        ({"bucket": None, "endpoint_url": "http://me:secret@host"}, r"^endpoint_url is 'http://host', and no bucket"),
    ],
)
def test_a_value_that_cannot_be_is_refused(folder, arguments, typed):
    with pytest.raises(ValueError, match=typed):
        folder(**arguments)


def test_a_listing_that_is_young_enough_is_taken_from_disk(folder, s3, png, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bucket = s3.fill({"t/a/1.png": png(), "t/b/2.png": png(), "t/c.txt": b"x"})
    first = folder(bucket, "t", listing_max_age_s=3600)
    s3.add(bucket, {"t/b/3.png": png()})
    again = folder(bucket, "t", listing_max_age_s=3600)
    assert (again.samples, again.skipped, again.n_bytes(1)) == (first.samples, first.skipped, len(png()))
    assert len(folder(bucket, "t")) == 3
    s3.add(bucket, {"u/b/3.png": png()})
    assert len(folder(bucket, "", listing_max_age_s=3600)) == 4  # another prefix is another listing
    other = s3.endpoint_url.replace("127.0.0.1", "localhost")
    assert len(folder(bucket, "t", listing_max_age_s=3600, endpoint_url=other)) == 3  # and so is another store
    for file in (tmp_path / "ddp_hydra" / "listings").iterdir():
        os.utime(file, (0, 0))
    assert len(folder(bucket, "t", listing_max_age_s=3600)) == 3
    for file in (tmp_path / "ddp_hydra" / "listings").iterdir():
        file.write_bytes(b"damaged")
    assert len(folder(bucket, "t", listing_max_age_s=3600)) == 3


def test_the_listing_of_another_store_with_this_bucket_is_not_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Bucket, "objects", lambda store, prefix: [(f"t/a/{store.endpoint_url[7:]}.png", 1)])
    for name in ("one", "two", "one"):
        data = S3ImageFolder("pets", "t", endpoint_url=f"http://{name}", listing_max_age_s=3600)
        assert data.samples[0][0] == f"t/a/{name}.png"


def test_a_cache_that_cannot_be_written_does_not_matter(folder, pets, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(folder(pets, "pets", listing_max_age_s=60)) == 3


def test_names_that_are_not_utf_8_or_have_a_line_break_are_read(png, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "all" / "a").mkdir(parents=True)
    try:
        for number, name in enumerate((b"a\xff.png", b"b\n.png", b"c.png")):
            Path(os.fsdecode(bytes(tmp_path / "all" / "a") + b"/" + name)).write_bytes(png(red=number))
    except OSError:
        pytest.skip("this file system has no such names")
    for _ in range(2):
        data = S3ImageFolder(f"file://{tmp_path}", "all", listing_max_age_s=3600)
        assert [os.fsencode(key)[6:] for key, _ in data.samples] == [b"a\xff.png", b"b\n.png", b"c.png"]
        assert [image[0, 0, 0].item() for image, _ in data] == [0, 1, 2]
        data.close()
    in_val = [is_of(key, 0.5, "val") for key, _ in data.samples]
    assert in_val == [not is_of(key, 0.5, "train") for key, _ in data.samples]


LOADING = """
import sys
from torch.utils.data import DataLoader
from ddp_hydra.data import S3ImageFolder, WidsShards
from ddp_hydra.data.transforms import EvalTransform
from ddp_hydra.storage import Access

if __name__ == "__main__":
    bucket, endpoint_url, folder, context = sys.argv[1:]
    images = S3ImageFolder(bucket, "pets", endpoint_url=endpoint_url, transform=EvalTransform(8))
    shards = WidsShards(f"s3://{bucket}/index.json", access=Access(endpoint_url), cache_dir=folder)
    images[0], shards[0]  # the store is in use before the processes begin
    workers = {"num_workers": 2, "multiprocessing_context": context, "collate_fn": list}
    print(len([image for batch in DataLoader(images, 2, **workers) for image in batch]))
    print(sum(int(sample[".cls"]) for batch in DataLoader(shards, 2, **workers) for sample in batch))
    images.close()
    shards.close()
"""


@pytest.mark.parametrize("context", [pytest.param("forkserver", marks=pytest.mark.slow), "fork"])
def test_a_data_loader_with_processes_reads_images_and_shards(s3, png, tmp_path, context):
    """By default its workers are forked until Python 3.14."""
    content = numbered(0, 5)
    index = index_of(described("a.tar", 5, content))
    bucket = s3.fill({"pets/a/1.png": png(), "pets/b/2.png": png(), "a.tar": content, "index.json": index})
    command = [sys.executable, "-c", LOADING, bucket, s3.endpoint_url, str(tmp_path), context]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "10"], done.stderr


# -- a part kept for validation ----------------------------------------------------------------------------


def test_a_share_of_the_images_is_held_out_by_its_keys(tmp_path):
    for number in range(60):
        file = tmp_path / "all" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(file)
    whole, train, val = (
        S3ImageFolder(f"file://{tmp_path}", "all", holdout=holdout, split=split)
        for holdout, split in ((0.0, "train"), (0.3, "train"), (0.3, "val"))
    )
    assert sorted([*train.samples, *val.samples]) == sorted(whole.samples)
    assert 5 < len(val) < 30
    assert train.classes == val.classes == ["a", "b"]
    assert val[0][1] == val.targets[0]
    for data in (whole, train, val):
        data.close()


def test_a_split_that_leaves_nothing_is_refused(tmp_path):
    (tmp_path / "all" / "a").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "all" / "a" / "one.png")
    split = "train" if is_of("all/a/one.png", 0.5, "val") else "val"
    with pytest.raises(ValueError, match=r"left in this split: type another data\.holdout="):
        S3ImageFolder(f"file://{tmp_path}", "all", holdout=0.5, split=split)
