"""What stores do wrong, and what becomes of a read then."""

from __future__ import annotations

import pickle
import threading
import time

import pytest

from data.stores import Bucket
from data.stores.patience import StaleCredentialsError, TemporaryError
from tests.fault_server import serving

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("credentials")]
CONTENT = bytes(range(256)) * 400


@pytest.fixture
def store():
    """A server with one large object and many small ones."""
    small = {f"photos/many/{number:03}.png": b"x" * number for number in range(25)}
    with serving({"photos/a.bin": CONTENT, **small}) as server:
        yield server


def bucket(store, **arguments) -> Bucket:
    return Bucket("photos", store.url, **{"timeout_s": 0.5, "patience_s": 20, **arguments})


@pytest.mark.parametrize("fault", ["503", "500", "reset", "half", "stall"])
def test_what_passes_is_read_in_the_end_and_counted(store, fault):
    store.fault = lambda number, path: fault if number < 2 else None
    data = bucket(store)
    assert bytes(data.get("a.bin")) == CONTENT
    assert (data.traffic.requests, data.traffic.retries, data.traffic.bytes) == (1, 2, len(CONTENT))


@pytest.mark.parametrize("fault", ["503", "half", "stall"])
def test_a_range_is_read_in_the_end(store, fault):
    store.fault = lambda number, path: fault if number < 1 else None
    assert bytes(bucket(store).get_range("a.bin", 1000, 90_000)) == CONTENT[1000:90_000]


def test_slow_is_not_broken(store):
    store.fault = lambda number, path: "slow"
    data = bucket(store, timeout_s=0.3)
    assert bytes(data.get("a.bin")) == CONTENT
    assert data.traffic.retries == 0


@pytest.mark.parametrize(("fault", "kind"), [("404", FileNotFoundError), ("403", PermissionError)])
def test_what_does_not_pass_is_asked_for_once(store, fault, kind):
    store.fault = lambda number, path: fault
    with pytest.raises(kind):
        bucket(store).get("a.bin")
    assert len(store.requests) == 1


def test_patience_ends(store):
    store.fault = lambda number, path: "503"
    begin = time.monotonic()
    with pytest.raises(TemporaryError, match=r"SlowDown.*try again later"):
        bucket(store, patience_s=0.5).get("a.bin")
    assert time.monotonic() - begin < 5
    assert len(store.requests) >= 2


def test_the_first_contact_is_less_patient(store):
    store.fault = lambda number, path: "503"
    data = bucket(store, patience_s=600)
    data.FIRST_PATIENCE_S = 0.3
    with pytest.raises(ConnectionError):
        data.folders()


def test_closing_ends_the_waiting(store):
    store.fault = lambda number, path: "503"
    data = bucket(store, patience_s=600)
    threading.Timer(0.5, data.close).start()
    with pytest.raises(TemporaryError):
        data.get("a.bin")
    store.fault = lambda number, path: None
    assert len(data.get("a.bin")) == len(CONTENT)


def test_a_listing_goes_on_behind_what_it_has_shown(store):
    store.page = 4
    store.fault = lambda number, path: "503" if number in (0, 2, 3, 5) else None
    data = bucket(store)
    assert list(data.objects("many")) == [(f"many/{number:03}.png", number) for number in range(25)]
    assert data.traffic.retries == 4


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
    threading.Timer(0.5, lambda: file.write_text(text.format("new"))).start()
    assert bytes(data.get("a.bin")) == CONTENT
    assert data.traffic.retries >= 1


def test_a_token_that_stays_expired_is_told(store):
    data = bucket(store, patience_s=0.5)
    data.get("a.bin")
    store.fault = lambda number, path: "expired"
    with pytest.raises(StaleCredentialsError, match=r"ExpiredToken.*AWS_SESSION_TOKEN"):
        data.get("a.bin")


def test_credentials_that_never_worked_are_refused_at_once(store):
    store.access_keys = {"another"}
    with pytest.raises(StaleCredentialsError, match="InvalidAccessKeyId"):
        bucket(store).get("a.bin")
    assert len(store.requests) == 1


def test_it_pickles_in_use_and_counts_anew(store):
    data = bucket(store)
    data.get("a.bin")
    again = pickle.loads(pickle.dumps(data))
    assert bytes(again.get("a.bin")) == CONTENT
    assert (data.traffic.requests, again.traffic.requests) == (1, 1)
