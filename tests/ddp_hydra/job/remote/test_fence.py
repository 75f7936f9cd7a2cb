from __future__ import annotations

import io
import threading

import pytest
from obstore.exceptions import NotSupportedError

from ddp_hydra.errors import TakenOver
from ddp_hydra.job.remote.status import FencedStore
from ddp_hydra.storage import LocalFolder, Store, urls
from tests.support.s3_server import KEYS, s3  # noqa: F401 (a fixture)


@pytest.fixture(params=["disk", "bucket"])
def there(request, tmp_path, monkeypatch, s3) -> Store:  # noqa: F811
    if request.param == "disk":
        return urls.open_folder(str(tmp_path / "runs"))
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3.endpoint_url}.items():
        monkeypatch.setenv(name, value)
    return urls.open_folder(f"s3://{s3.fill({})}/runs")


def test_it_has_each_method_of_a_store_but_for_those_that_no_driver_uses():
    methods = {name for name, value in vars(Store).items() if callable(value) and not name.startswith("_")}
    by_others, unused = {"size_or_none", "stream", "public_url"}, {"put_if", "folders", "close"}
    assert methods - vars(FencedStore).keys() == by_others | unused


@pytest.mark.medium
def test_it_lists_and_reads_what_is_there(there):
    fenced = FencedStore(there)
    fenced.acquire(None)
    fenced.put(key := "checkpoints/step-000001/state.pt", b"1")
    assert list(fenced.objects("checkpoints")) == [(key, 1)]
    assert b"".join(map(bytes, fenced.stream(key, 1))) == b"1"


@pytest.mark.medium
def test_of_many_who_acquire_at_once_one_is_the_owner(there):
    stores = [FencedStore(there) for _ in range(4)]
    seen, won = [one.owner() for one in stores], []

    def acquire(one: FencedStore, before: str | None) -> None:
        try:
            one.acquire(before)
            won.append(one)
        except TakenOver:
            pass

    threads = [threading.Thread(target=acquire, args=pair) for pair in zip(stores, seen, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (owner,) = won
    owner.check()
    assert there.get("owner").decode().strip() == owner.token


@pytest.mark.medium
def test_who_was_the_owner_overwrites_and_removes_nothing(there):
    one, other = FencedStore(there), FencedStore(there)
    one.acquire(one.owner())
    one.put("checkpoints/manifest.json", b"one's")
    other.acquire(other.owner())
    other.put("checkpoints/manifest.json", b"the other's")
    for write in (
        lambda: one.put("checkpoints/manifest.json", b"one's again"),
        lambda: one.put("checkpoints/new", b"x"),
        lambda: one.put("checkpoints/step", io.BytesIO(b"x")),
        lambda: one.delete("checkpoints/manifest.json"),
    ):
        with pytest.raises(TakenOver, match=r"another driver has taken over .*: this one ends"):
            write()
    assert there.get("checkpoints/manifest.json") == b"the other's"
    other.put("checkpoints/manifest.json", b"the other's again")
    assert (there.size_or_none("checkpoints/new"), there.size_or_none("checkpoints/step")) == (None, None)


@pytest.mark.medium
def test_what_the_one_before_put_there_late_is_replaced(there):
    one, other = FencedStore(there), FencedStore(there)
    one.acquire(one.owner())
    other.acquire(other.owner())
    other.put("x", b"1")
    there.put("x", b"late, by one")
    other.put("x", b"22")
    assert there.get("x") == b"22"


@pytest.mark.parametrize("answer", ["ignores", "refuses", "knows If-None-Match alone"])
def test_a_store_without_conditions_is_used_and_said(tmp_path, caplog, answer):
    class Plain(LocalFolder):
        def put_if(self, key, content, etag):
            if answer == "refuses":
                raise NotImplementedError
            if answer == "knows If-None-Match alone" and etag is None:
                return super().put_if(key, content, etag)
            self.put(key, content)
            return "x"

    there = Plain(tmp_path, setting=None)
    one, other = FencedStore(there), FencedStore(there)
    one.acquire(one.owner())
    one.warn_if_unconditional()
    assert "takes no conditional writes" in caplog.text
    one.put("x", b"1")
    other.acquire(other.owner())
    with pytest.raises(TakenOver):
        one.put("x", b"2")
    assert there.get("x") == b"1"


def test_a_bucket_that_knows_no_conditions_says_so(monkeypatch):
    def put(*_, **__):
        raise NotSupportedError("501")

    monkeypatch.setattr("obstore.put", put)
    folder = urls.open_folder("s3://bucket/a")
    with pytest.raises(NotImplementedError):
        folder.put_if("x", b"", None)
