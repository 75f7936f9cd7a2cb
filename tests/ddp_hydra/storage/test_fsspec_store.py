"""Stores that fsspec reads: faults that pass, faults that don't, and what is said of them."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ddp_hydra.errors import ConfigError
from ddp_hydra.job.remote.status import FencedStore
from ddp_hydra.storage import Access, Bucket, urls
from ddp_hydra.storage.base import TemporaryError
from ddp_hydra.storage.fsspec_store import FsspecStore
from ddp_hydra.storage.s3 import BucketAddress
from tests.support.fault_server import serving
from tests.support.warm_server import wait_for

REGISTRY = importlib.import_module("fsspec.registry")._registry
CONTENT = bytes(range(256)) * 1000


class FaultyFileSystem(MemoryFileSystem):
    """A file system in memory whose calls may fail."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    opened: ClassVar[int] = 0
    fail: ClassVar[Callable[[str, str], None]] = staticmethod(lambda call, path: None)

    def __init__(self, *, password: str = "") -> None:
        super().__init__()
        type(self).opened += 1

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self.fail("cat", path)
        return super().cat_file(path, *args, **kwargs)

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self.fail("ls", path)
        return super().ls(path, *args, **kwargs)


@pytest.fixture
def faulty(monkeypatch) -> type[FaultyFileSystem]:
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    for name, value in {"store": {}, "pseudo_dirs": [""], "opened": 0}.items():
        monkeypatch.setattr(FaultyFileSystem, name, value)
    yield FaultyFileSystem
    REGISTRY.pop("faulty")


def failing(monkeypatch, error: Exception, times: int = 1000, call: str = "cat", path: str = "") -> list[str]:
    calls: list[str] = []

    def fail(made: str, of: str) -> None:
        if made == call and of.endswith(path):
            calls.append(of)
            if len(calls) <= times:
                raise error

    monkeypatch.setattr(FaultyFileSystem, "fail", staticmethod(fail))
    return calls


class AuthenticationException(Exception):
    """As paramiko's and Azure's: no OSError."""


class Unauthorized(Exception):
    """As of an HTTP client whose token has expired."""

    status = 401


@pytest.mark.parametrize(
    "error", [ConnectionResetError("cut"), TimeoutError(), EOFError(), Exception("dropped"), Unauthorized()]
)
@pytest.mark.medium
def test_a_broken_connection_is_made_anew(faulty, monkeypatch, error):
    store = FsspecStore("faulty://a", retry_timeout_s=20)
    store.put("x", b"1")
    calls, opened = failing(monkeypatch, error, times=2), faulty.opened
    assert store.get("x") == b"1"
    assert (len(calls), store.traffic.retries, faulty.opened - opened) == (3, 2, 2)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            PermissionError("not yours"),
            PermissionError,
            r"faulty://me@host/a/x was refused \(not yours\).*FSSPEC_FAULTY_",
        ),
        (AuthenticationException("no such user"), PermissionError, "no such user"),
        (FileNotFoundError("x"), FileNotFoundError, "there is no file faulty://me@host/a/x"),
    ],
)
def test_what_does_not_pass_is_asked_for_once_and_tells_no_password(faulty, monkeypatch, error, kind, said):
    store = FsspecStore("faulty://me:secret@host/a", {"password": "secret"}, retry_timeout_s=20)
    calls = failing(monkeypatch, error)
    with pytest.raises(kind, match=said) as failure:
        store.get("x")
    assert "secret" not in str(failure.value)
    assert len(calls) == 1


@pytest.mark.medium
def test_patience_ends_and_closing_ends_it_at_once(faulty, monkeypatch):
    failing(monkeypatch, ConnectionResetError("cut"))
    with pytest.raises(
        TemporaryError, match=r"faulty://a/x can't be reached \(cut\): check the network and data\.bucket="
    ):
        FsspecStore("faulty://a", retry_timeout_s=0.2).get("x")
    patient, calls = FsspecStore("faulty://a", retry_timeout_s=600), failing(monkeypatch, ConnectionResetError("cut"))
    closer = threading.Thread(target=lambda: (wait_for(lambda: calls, "a call"), patient.close()))
    closer.start()
    with pytest.raises(TemporaryError):
        patient.get("x")
    closer.join()


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_left_out(faulty, monkeypatch):
    store = FsspecStore("faulty://a", retry_timeout_s=0)
    for key in ("open/1", "closed/2"):
        store.put(key, b"x")
    assert len(list(store.objects())) == 2
    failing(monkeypatch, PermissionError("not yours"), call="ls", path="closed")
    with pytest.raises(PermissionError, match="not yours"):
        list(store.objects())


def test_options_that_are_none_are_named(faulty):
    with pytest.raises(ValueError, match=r"fsspec can't open faulty://a: .*user.*data\.storage_options"):
        FsspecStore("faulty://a", {"user": "me"}).get("x")


def test_it_goes_on_in_a_forked_process(faulty):
    store = FsspecStore("faulty://a")
    store.put("x", b"1")
    parent, child = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: child.send(store.get("x")))
    process.start()
    assert parent.poll(100)
    assert parent.recv() == b"1"
    process.join()
    parent.close()
    child.close()


@pytest.mark.medium
def test_urls_of_fsspec_are_data(tmp_path, monkeypatch):
    access = Access()
    access.bucket("memory://photos/train").put("a/1.png", b"1")
    store, key = access.open("memory://photos/train/a/1.png")
    assert store.get(key) == b"1"
    store, prefix = access.open_folder("memory://photos/train")
    assert list(store.objects(prefix)) == [("train/a/1.png", 1)]
    assert access.open("memory://photos/b")[0] is store
    assert isinstance(access.open("gs://photos/a")[0], Bucket)
    assert access.bucket("az://photos").url == "az://photos"
    assert isinstance(Access(client="s3fs").open("s3://photos/a")[0], FsspecStore)
    with pytest.raises(ValueError, match=r"client is 'boto', and is obstore or s3fs: type data\.client=obstore"):
        Access(client="boto")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(REGISTRY, "sftp", raising=False)
    with pytest.raises(
        ModuleNotFoundError, match=r"sftp:// needs another package, here and on the workers: .*paramiko"
    ):
        Access().open("sftp://host/a")
    with pytest.raises(ConfigError, match="sftp:// needs another package"):
        urls.open_folder("sftp://host/runs")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(REGISTRY, "s3", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"s3:// needs another package.*s3fs"):
        Access(client="s3fs")


def test_without_conditional_writes_it_is_said_and_the_owner_is_looked_up(faulty, caplog):
    first, second = (FencedStore(urls.open_folder("faulty://me@host/runs/a")) for _ in range(2))
    with caplog.at_level(logging.WARNING):
        first.acquire(first.owner())
        first.warn_if_unconditional()
    assert "takes no conditional writes" in caplog.text
    first.put("status.json", b"1")
    second.acquire(second.owner())
    with pytest.raises(Exception, match="another driver has taken over"):
        first.put("status.json", b"2")
    second.put("status.json", b"3")
    assert second.get("status.json") == b"3"


def test_results_say_whether_trying_again_may_help(faulty, monkeypatch):
    folder = urls.open_folder("faulty://host/runs")
    assert (folder.size_or_none("none"), folder.etag("none")) == (None, None)
    with pytest.raises(FileNotFoundError):
        folder.get("none")
    for error, kind in ((PermissionError("no"), ConfigError), (TimeoutError(), ConnectionError)):
        failing(monkeypatch, error)
        with pytest.raises(kind):
            folder.get("none")


# --- s3fs; test_faults.py has what it does where a server misbehaves


@pytest.fixture
def server() -> Iterator[Any]:
    with serving({"photos/a.bin": CONTENT}) as store:
        yield store


def bucket(server: Any, credentials: Any = ("key", "secret"), **arguments: Any) -> FsspecStore:
    given = {"timeout_s": 30.0, "retry_timeout_s": 20, **arguments}
    return FsspecStore("s3://photos", bucket=BucketAddress("photos", server.url, credentials=credentials), **given)


@pytest.mark.integration
def test_a_server_that_is_gone_is_said_to_be(server):
    server.close()
    with pytest.raises(TemporaryError, match=r"is not reachable.*data\.endpoint_url"):
        bucket(server, retry_timeout_s=0.5).get("a.bin")


@pytest.mark.integration
def test_readers_who_pay_and_profiles_are_taken(server, monkeypatch, tmp_path):
    headers: list[str | None] = []
    answer = server.answer
    monkeypatch.setattr(
        server, "answer", lambda request: (headers.append(request.headers["x-amz-request-payer"]), answer(request))
    )
    assert bucket(server, options={"requester_pays": True}).get("a.bin") == CONTENT
    assert headers == ["requester"]
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = teams\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    server.access_keys = {"teams"}
    assert bucket(server, credentials=None).get("a.bin") == CONTENT
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(PermissionError, match=r"other.*AWS_PROFILE"):
        bucket(server, credentials=None).get("a.bin")


@pytest.mark.integration
def test_nobodys_credentials_are_asked_for(server, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(PermissionError, match=r"no credentials were found.*AWS_ACCESS_KEY_ID"):
        bucket(server, credentials=None).get("a.bin")
