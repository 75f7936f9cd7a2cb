"""What every store does, whatever it is read with: a folder, obstore and s3fs on a real S3 store, and fsspec."""

from __future__ import annotations

import io
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_hydra.data.demo_server import Seaweed
from ddp_hydra.storage import Bucket, LocalFolder
from ddp_hydra.storage.base import NoBucketError, ObjectChangedError
from ddp_hydra.storage.fsspec_store import FsspecStore
from ddp_hydra.storage.s3 import BucketAddress

pytestmark = pytest.mark.integration
BUCKETS = ("obstore", "s3fs")
ODD = ("a b/ü+&%41.txt", "x=1/what?#.txt", "a:b;c,d@e", 'it\'s "it"', "[1]*/{2}.txt", "~/.hidden")


@dataclass
class Place:
    """A store with nothing in the folder `top`."""

    store: Any
    top: str
    other: Callable[..., Any]
    s3: Seaweed | None = None

    def key(self, name: str) -> str:
        return f"{self.top}/{name}".lstrip("/")


@pytest.fixture(scope="module")
def seaweed() -> Iterator[Seaweed]:
    with Seaweed("things") as store:
        store.wait_until_ready(60)
        yield store


@pytest.fixture(params=["folder", *BUCKETS, "fsspec-memory", "fsspec-local"])
def place(request, tmp_path, seaweed) -> Place:
    kind, run = request.param, uuid.uuid4().hex
    if kind in BUCKETS:

        def other(name: str = "things", **arguments: Any) -> Any:
            given = {"endpoint_url": seaweed.endpoint_url, "credentials": seaweed.credentials, **arguments}
            if kind == "obstore":
                return Bucket(name, retry_timeout_s=30, **given)
            return FsspecStore(f"s3://{name}", bucket=BucketAddress(name, **given), retry_timeout_s=30)

        return Place(other(), run, other, seaweed)
    if kind == "folder":
        return Place(LocalFolder(tmp_path), "", lambda name: LocalFolder(tmp_path / name))
    if kind == "fsspec-local":
        return Place(FsspecStore(f"local://{tmp_path}"), "", lambda name: FsspecStore(f"local://{tmp_path}/{name}"))
    store = FsspecStore(f"memory://{run}")
    store.put("begun", b"")
    store.delete("begun")
    return Place(store, "", lambda name: FsspecStore(f"memory://{run}{name}"))


def test_what_was_put_is_read_whole_and_in_parts(place):
    key = place.key("a/1.bin")
    place.store.put(key, b"0123456789")
    assert bytes(place.store.get(key)) == bytes(place.store.get(key, 10)) == b"0123456789"
    assert bytes(place.store.get_range(key, 2, 5)) == b"234"
    assert bytes(place.store.get_range(key, 9, 10)) == b"9"
    assert b"".join(map(bytes, place.store.stream(key, 10, 4))) == b"456789"
    assert place.store.size(key) == 10
    assert place.store.ranges
    assert place.store.traffic.bytes >= 30


def test_an_object_is_replaced(place, tmp_path):
    key = place.key("a/1.bin")
    place.store.put(key, b"first")
    place.store.put(key, io.BytesIO(b"second"))
    assert bytes(place.store.get(key)) == b"second"
    (tmp_path / "file").write_bytes(b"third")
    with (tmp_path / "file").open("rb") as file:
        place.store.put(key, file)
    assert bytes(place.store.get(key)) == b"third"
    assert [name for name, _ in place.store.objects(place.key("a"))] == [key]
    assert not list(tmp_path.rglob(".*.part"))


def test_a_large_object_is_whole(place):
    content = os.urandom(20 * 2**20)
    place.store.put(place.key("large"), io.BytesIO(content))
    assert bytes(place.store.get(place.key("large"), len(content))) == content
    assert bytes(place.store.get_range(place.key("large"), 9_000_000, 9_000_100)) == content[9_000_000:9_000_100]


def test_a_listing_is_whole(place):
    names = {f"deep/{number % 3}/{number:04}.bin": number % 5 for number in range(1010 if place.s3 else 200)}
    store = place.store
    if place.s3:  # obstore writes more quickly than s3fs
        store = Bucket("things", place.s3.endpoint_url, credentials=place.s3.credentials)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda item: store.put(place.key(item[0]), b"x" * item[1]), names.items()))
    found = list(place.store.objects(place.key("deep")))
    assert dict(found) == {place.key(name): size for name, size in names.items()}
    assert len(found) == len(names)
    assert {name for name, _ in place.store.objects(place.key("deep/1"))} == {
        place.key(name) for name in names if name.startswith("deep/1/")
    }
    assert place.store.folders(place.key("deep")) == ["0", "1", "2"]
    assert place.store.folders(place.key("deep/1")) == []


def test_a_prefix_is_a_folder_and_no_beginning_of_a_name(place):
    for name in ("a/1", "ab/2", "a.txt"):
        place.store.put(place.key(name), b"x")
    assert [name for name, _ in place.store.objects(place.key("a"))] == [place.key("a/1")]


def test_what_is_not_there(place):
    place.store.put(place.key("folder/file"), b"x")
    for name in ("none", "folder/none", "none/none", "folder"):
        with pytest.raises((FileNotFoundError, IsADirectoryError)):
            place.store.get(place.key(name))
    for request in (lambda key: place.store.get_range(key, 0, 1), place.store.size):
        with pytest.raises(FileNotFoundError):
            request(place.key("none"))
    assert place.store.etag(place.key("none")) is None
    assert list(place.store.objects(place.key("none"))) == []
    assert place.store.folders(place.key("none")) == []


def test_a_store_that_is_not_there_is_no_empty_one(place):
    with pytest.raises(NoBucketError if place.s3 else FileNotFoundError, match="there is no"):
        list(place.other("nowhere").objects())


@pytest.mark.parametrize("name", ODD)
def test_names_have_any_characters(place, name):
    place.store.put(place.key(name), b"odd")
    assert bytes(place.store.get(place.key(name))) == b"odd"
    assert bytes(place.store.get_range(place.key(name), 1, 2)) == b"d"
    assert place.store.size(place.key(name)) == 3
    listed = list(place.store.objects(place.top))
    assert listed == [(place.key(name), 3)]
    place.store.delete(place.key(name))
    assert place.store.etag(place.key(name)) is None


def test_deleted_is_gone_and_may_be_deleted_again(place):
    key = place.key("a/1.bin")
    for name in (key, place.key("kept")):
        place.store.put(name, b"x")
    for _ in range(2):
        place.store.delete(key)
        assert list(place.store.objects(place.top)) == [(place.key("kept"), 1)]


def test_a_tag_belongs_to_a_content(place):
    key = place.key("a")
    place.store.put(key, b"first")
    first = place.store.etag(key)
    assert first == place.store.etag(key)
    place.store.put(key, b"second")
    assert place.store.etag(key) not in (first, None)


def test_a_write_on_a_condition_is_made_once_or_refused_altogether(place):
    key = place.key("owner")
    if isinstance(place.store, FsspecStore):
        with pytest.raises(NotImplementedError):
            place.store.put_if(key, b"1", None)
        assert place.store.etag(key) is None
        return
    with ThreadPoolExecutor(4) as pool:
        tags = [tag for tag in pool.map(lambda number: put_if(place, key, number), range(4)) if tag]
    assert len(tags) == 1
    assert place.store.etag(key) == tags[0]
    second = place.store.put_if(key, b"second", tags[0])
    for tag in (tags[0], None):
        with pytest.raises(ObjectChangedError):
            place.store.put_if(key, b"third", tag)
    place.store.delete(key)
    with pytest.raises(ObjectChangedError):
        place.store.put_if(key, b"third", second)
    assert place.store.etag(key) is None


def put_if(place: Place, key: str, number: int) -> str | None:
    try:
        return place.store.put_if(key, f"{number}".encode(), None)
    except ObjectChangedError:
        return None


def test_many_threads_read_a_store(place):
    place.store.put(place.key("a"), b"0123456789")
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: bytes(place.store.get_range(place.key("a"), n % 9, n % 9 + 1)), range(200)))
    assert found == [str(n % 9).encode() for n in range(200)]


def test_it_is_pickled_while_it_is_in_use_and_counts_anew(place):
    place.store.put(place.key("a"), b"x")
    again = pickle.loads(pickle.dumps(place.store))
    assert bytes(again.get(place.key("a"))) == b"x"
    assert again.traffic.requests == 1


@pytest.mark.parametrize("place", BUCKETS, indirect=True)
def test_who_has_no_key_is_refused(place):
    place.store.put(place.key("a"), b"x")
    for arguments in ({"credentials": ("who", "am-i")}, {"anon": True, "credentials": None}):
        stranger = place.other(**arguments)
        for request in (
            lambda store=stranger: store.get(place.key("a")),
            lambda store=stranger: list(store.objects(place.top)),
            lambda store=stranger: store.put(place.key("b"), b"x"),
            lambda store=stranger: store.etag(place.key("a")),
        ):
            with pytest.raises(PermissionError, match=r"things.*refused"):
                request()
    assert place.store.etag(place.key("b")) is None


@pytest.mark.parametrize("place", ["folder", "fsspec-memory", "fsspec-local"], indirect=True)
def test_a_key_does_not_lead_out_of_a_folder(place):
    for key in ("../x", "/etc/hostname", "a/../../x"):
        with pytest.raises(ValueError, match="leads out"):
            place.store.get(key)


def test_a_half_written_file_has_not_its_name(tmp_path: Path, monkeypatch):
    store = FsspecStore(f"local://{tmp_path}", retry_timeout_s=0)
    store.put("a", b"first")

    class Broken(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            raise ConnectionResetError("the disk is gone")

    with pytest.raises(ConnectionError):
        store.put("a", Broken())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"first"}
