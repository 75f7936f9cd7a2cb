"""What stores do wrong, and what becomes of a read then."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from botocore.credentials import RefreshableCredentials

from ddp_hydra.job.summary import explain
from ddp_hydra.rank.process import describe
from ddp_hydra.storage import Bucket
from ddp_hydra.storage.base import OtherRegionError, RangesIgnoredError, StaleCredentialsError, TemporaryError
from ddp_hydra.storage.fsspec_store import FsspecStore
from ddp_hydra.storage.s3 import BucketAddress, _ProfileCredentials
from tests.support.fault_server import WRONG_ANSWERS, WRONG_PAGES, serving
from tests.support.warm_server import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("credentials")]
CONTENT = bytes(range(256)) * 400


@pytest.fixture
def store():
    """A server with one large object and many small ones."""
    small = {f"photos/many/{number:03}.png": b"x" * number for number in range(25)}
    with serving({"photos/a.bin": CONTENT, **small}) as server:
        yield server


STALL_S = 1.0
"""How long an answer is waited for that never comes. All others have longer, for a busy machine."""


def bucket(store, client: str = "obstore", **arguments) -> Bucket | FsspecStore:
    given = {"timeout_s": 30.0, "retry_timeout_s": 20, **arguments}
    if client == "s3fs":
        return FsspecStore("s3://photos", bucket=BucketAddress("photos", store.url), **given)
    return Bucket("photos", store.url, **given)


both = pytest.mark.parametrize("client", ["obstore", "s3fs"])


def in_fork(function):
    """What a function returns in a fork of this process."""
    context = multiprocessing.get_context("fork")
    parent, child = context.Pipe()
    process = context.Process(target=lambda: child.send(function()))
    process.start()
    with parent, child:
        assert parent.poll(100)
        found = parent.recv()
    process.join()
    return found


def test_forks_read_all_that_their_parent_can_and_write_nothing(store):
    data = bucket(store)
    assert data.size("a.bin") == len(CONTENT), "the client has been used"

    def read():
        return [
            bytes(data.get("a.bin")) == CONTENT,
            bytes(data.get_range("a.bin", 3, 9)),
            b"".join(map(bytes, data.stream("a.bin", len(CONTENT)))) == CONTENT,
            data.size("a.bin"),
            data.folders(),
            len(list(data.objects("many"))),
        ]

    def write():
        with pytest.raises(RuntimeError, match="a store was used in a process that then forked this one"):
            data.put("b", b"")
        return read()

    assert read() == [True, CONTENT[3:9], True, len(CONTENT), ["many"], 25]
    assert in_fork(write) == in_fork(lambda: in_fork(read)) == read()


@both
@pytest.mark.parametrize("fault", ["503", "500", "reset", "half", "stall"])
def test_what_passes_is_read_in_the_end_and_counted(store, fault, client):
    store.fault = lambda number, path: fault if number < 2 else None
    data = bucket(store, client, timeout_s=STALL_S if fault == "stall" else 30.0)
    assert bytes(data.get("a.bin")) == CONTENT
    assert (data.traffic.requests, data.traffic.bytes) == (1, len(CONTENT))
    # aiohttp itself repeats a connection that was reset
    least = 1 if (client, fault) == ("s3fs", "reset") else 2
    assert data.traffic.retries == least or (fault == "stall" and data.traffic.retries > least)


@pytest.mark.parametrize("fault", ["503", "half", "stall"])
def test_a_range_is_read_in_the_end(store, fault):
    store.fault = lambda number, path: fault if number < 1 else None
    data = bucket(store, timeout_s=STALL_S if fault == "stall" else 30.0)
    assert bytes(data.get_range("a.bin", 1000, 90_000)) == CONTENT[1000:90_000]


@pytest.mark.medium
def test_slow_is_not_broken(store):
    store.fault, store.slow_s = lambda number, path: "slow", 0.4
    data = bucket(store, timeout_s=1.5)  # the whole takes longer, and each part less
    assert bytes(data.get("a.bin")) == CONTENT
    assert data.traffic.retries == 0


@both
@pytest.mark.parametrize(("fault", "kind"), [("404", FileNotFoundError), ("403", PermissionError)])
def test_what_does_not_pass_is_asked_for_once(store, fault, kind, client):
    store.fault = lambda number, path: fault
    with pytest.raises(kind, match="photos"):
        bucket(store, client).get("a.bin")
    assert len(store.requests) == 1


def test_patience_ends(store):
    store.fault = lambda number, path: "503"
    with pytest.raises(TemporaryError, match=r"SlowDown.*try again later"):
        bucket(store, retry_timeout_s=0.5).get("a.bin")
    assert len(store.requests) >= 2


def test_the_first_contact_is_less_patient(store):
    store.fault = lambda number, path: "503"
    data = bucket(store, retry_timeout_s=600)
    data.FIRST_RETRY_TIMEOUT_S = 0.3
    with pytest.raises(ConnectionError):
        data.folders()


def test_closing_ends_the_waiting(store):
    store.fault = lambda number, path: "503"
    data = bucket(store, retry_timeout_s=600)
    closer = threading.Thread(target=lambda: (wait_for(lambda: store.requests, "a request"), data.close()))
    closer.start()
    with pytest.raises(TemporaryError):
        data.get("a.bin")
    closer.join()
    store.fault = lambda number, path: None
    assert len(data.get("a.bin")) == len(CONTENT)


MANY = [(f"many/{number:03}.png", number) for number in range(25)]


def test_a_listing_goes_on_behind_what_it_has_shown(store):
    store.page = 4
    store.fault = lambda number, path: "503" if number in (0, 2, 3, 5) else None
    data = bucket(store)
    assert list(data.objects("many")) == MANY
    assert data.traffic.retries == 4


@pytest.mark.parametrize("fault", [*WRONG_ANSWERS, *WRONG_PAGES, "301"])
@pytest.mark.parametrize("at", [0, 3, 6], ids=["first", "amid", "last"])
def test_an_odd_page_ends_no_listing(store, fault, at):
    store.page = 4
    store.fault = lambda number, path: fault if number == at else None
    assert list(bucket(store).objects("many")) == MANY


@pytest.mark.parametrize("fault", ["503", "reset", "stall", *WRONG_ANSWERS, *WRONG_PAGES])
def test_a_listing_of_s3fs_is_whole_or_an_error(store, fault):
    store.page = 10
    store.fault = lambda number, path: fault if number == 1 else None
    with contextlib.suppress(ConnectionError):
        data = bucket(store, "s3fs", timeout_s=STALL_S if fault == "stall" else 30.0)
        assert list(data.objects("many")) == MANY


@pytest.mark.parametrize("fault", [*WRONG_ANSWERS, "cut"])
def test_a_listing_that_never_comes_to_its_end_is_an_error(store, fault):
    store.page = 4
    store.fault = lambda number, path: fault if number > 2 else None
    with pytest.raises(ConnectionError, match=r"(broke off at 'many/011\.png'|what is not a listing).*try again later"):
        list(bucket(store, retry_timeout_s=0.3).objects("many"))


@pytest.mark.parametrize(("client", "fault"), [("s3fs", "html"), *(("obstore", fault) for fault in WRONG_ANSWERS)])
def test_a_server_that_answers_everything_with_a_page_is_no_empty_store(store, fault, client):
    store.fault = lambda number, path: fault
    with pytest.raises(TemporaryError, match=r"what is not a listing.*data\.endpoint_url"):
        list(bucket(store, client, retry_timeout_s=0.1).objects("train"))
    store.fault = lambda number, path: "403" if path.endswith("no-object") else None  # readers may list only
    assert list(bucket(store, client).objects("train")) == []


@both
def test_an_object_that_stalls_is_named(store, client):
    store.fault = lambda number, path: "stall" if path.endswith("a.bin") else None
    data = bucket(store, client, timeout_s=0.3, retry_timeout_s=0.1)
    with pytest.raises(TemporaryError, match=r"^s3://photos/a\.bin: the store at .* is not reachable") as error:
        data.get("a.bin")
    failure = describe(error.value)
    assert (failure.message, failure.traceback, failure.mistake) == (str(error.value), "", False)  # tried again
    assert explain(error.value) == str(error.value)


def test_a_store_that_sorts_by_time_and_knows_only_whole_keys_is_listed_once(store, monkeypatch):
    # rclone does so: it goes on behind the key that it is told, or begins anew where it does not know that one.
    def listing(bucket, query, fault):
        asked = query.get("continuation-token") or query.get("start-after")
        keys = sorted((path for path in store.objects if "/many/" in path), key=lambda path: path[::-1])
        names = [path.partition("/")[2] for path in keys]
        start = names.index(asked) + 1 if asked in names else 0
        page, more = names[start : start + 4], start + 4 < len(names)
        contents = "".join(
            f"<Contents><Key>{name}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in page
        )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult><IsTruncated>{more}</IsTruncated>{token}{contents}</ListBucketResult>".encode()

    monkeypatch.setattr(store, "_listing", listing)
    store.fault = lambda number, path: "503" if number == 3 else "error" if number == 4 else None
    assert sorted(key for key, _ in bucket(store).objects("many")) == [key for key, _ in MANY]


@pytest.mark.parametrize("name", ["a", ".b", "..c", "a%1", "x#~[y]", "名", "b c/.d", "e/ü+ö"])
def test_a_listing_may_end_with_any_key(store, name):
    store.objects = {"photos/0.png": b"x", f"photos/{name}": b"y"}
    store.fault = lambda number, path: "error" if number == 1 else None
    assert sorted(bucket(store).objects()) == sorted([("0.png", 1), (name, 1)])


def test_folders_are_listed_until_two_answers_agree(store):
    store.objects |= {f"photos/{name}/1.png": b"x" for name in "ab"}
    store.fault = lambda number, path: "error" if number == 0 else None
    assert bucket(store).folders() == ["a", "b", "many"]


@both
@pytest.mark.parametrize("fault", ["short", *WRONG_ANSWERS])
def test_what_came_with_another_size_than_was_listed_is_read_again(store, fault, client):
    store.fault = lambda number, path: fault if number < 1 else None
    data = bucket(store, client)
    assert bytes(data.get("a.bin", len(CONTENT))) == CONTENT
    assert data.traffic.retries == 1
    if client == "s3fs":
        return
    store.fault = lambda number, path: fault if store.requests[-1][0] == "GET" else None
    data.retry_timeout_s = 0.2
    with pytest.raises(ValueError, match=r"s3://photos/a\.bin came with [\d,]+ bytes in place of 102,400"):
        data.get("a.bin", len(CONTENT))
    with pytest.raises((ValueError, OSError), match=r"bytes in place of|gives whole objects only"):
        data.get_range("a.bin", 0, 1000)


def test_what_was_changed_since_it_was_listed_is_taken_as_it_is(store):
    assert bytes(bucket(store).get("a.bin", 5)) == CONTENT


def test_a_store_without_ranges_is_read_in_one_go_and_a_break_costs_no_byte_twice_given(store):
    store.ranges = False
    data = bucket(store)
    with pytest.raises(RangesIgnoredError, match=r"s3://photos gives whole objects only"):
        data.get_range("a.bin", 0, 1000)
    faults = iter(["half", None, "short", "error", None])
    store.fault = lambda number, path: next(faults, None)
    for start in (0, 70_000):
        assert b"".join(data.stream("a.bin", len(CONTENT), start)) == CONTENT[start:]
    assert next(faults, "none") == "none"


def test_a_redirect_is_waited_for_where_the_bucket_was_read_before(store):
    data = bucket(store, retry_timeout_s=0.2)
    data.get("a.bin")
    store.fault = lambda number, path: "301" if number == 1 else None
    assert bytes(data.get("a.bin")) == CONTENT
    store.fault = lambda number, path: "301"
    with pytest.raises(OtherRegionError, match=r"type data\.region=.*check data\.endpoint_url=") as error:
        data.get("a.bin")
    assert not isinstance(error.value, ValueError)  # which would be the sample's own fault


def test_credentials_that_expire_are_read_anew(store, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = secret\n"
    file.write_text(text.format("old"))
    store.access_keys = {"old"}
    data = bucket(store)
    assert bytes(data.get("a.bin")) == CONTENT
    store.access_keys = {"new"}  # expired at the store's; whoever renews them takes a moment

    def renew() -> None:
        new = tmp_path / "new"
        new.write_text(text.format("new"))
        new.replace(file)  # nobody reads half of it

    threading.Timer(0.5, renew).start()
    assert bytes(data.get("a.bin")) == CONTENT
    assert data.traffic.retries >= 1


@both
def test_a_head_request_that_credentials_have_expired_for_is_made_again(store, client):
    data = bucket(store, client)
    store.fault = lambda number, path: "expired" if number == 1 else None
    assert [data.size("a.bin"), data.size("a.bin")] == [len(CONTENT)] * 2
    assert data.traffic.retries == 1


def test_credentials_of_a_session_are_used_no_longer_than_botocore_vouches_for(monkeypatch):
    def renewed():
        return {"access_key": "a", "secret_key": "b", "token": "c", "expiry_time": until.isoformat()}

    until = datetime.now(UTC) + timedelta(minutes=16)  # more than the 15 at which botocore begins to renew them
    found = RefreshableCredentials.create_from_metadata(renewed(), renewed, "sts")
    session = SimpleNamespace(get_config_variable=lambda name: None)
    assert _ProfileCredentials(session, found)()["expires_at"] < until


def test_a_token_that_stays_expired_is_told(store):
    data = bucket(store, retry_timeout_s=0.5)
    data.get("a.bin")
    store.fault = lambda number, path: "expired"
    with pytest.raises(StaleCredentialsError, match=r"ExpiredToken.*AWS_SESSION_TOKEN"):
        data.get("a.bin")


def test_credentials_that_never_worked_are_refused_at_once(store):
    store.access_keys = {"another"}
    with pytest.raises(StaleCredentialsError, match="InvalidAccessKeyId"):
        bucket(store).get("a.bin")
    assert len(store.requests) == 1
