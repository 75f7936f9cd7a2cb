"""Removal of runs in a store, against a real S3 server."""

from __future__ import annotations

import json
import time

import pytest

from ddp_hydra.cli import runs
from ddp_hydra.errors import ConfigError, TakenOver
from ddp_hydra.job.remote.status import OWNER, FencedStore
from ddp_hydra.runs import disk
from ddp_hydra.storage import urls
from tests.support.s3_server import KEYS, s3  # noqa: F401 (a fixture)

pytestmark = pytest.mark.medium


@pytest.fixture
def bucket(s3, monkeypatch) -> str:  # noqa: F811
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3.endpoint_url}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.fill({})}"


def stored(url: str, **status) -> FencedStore:
    """Write a run as its driver does; return the driver's store."""
    driver = FencedStore(urls.open_folder(url))
    driver.acquire(driver.owner())
    status = {"state": "done", "time": time.time(), "files": [], **status}
    for name in (".hydra/config.yaml", "metrics.jsonl", "checkpoints/step-000001-0123456789ab.pt"):
        driver.put(name, b"12345")
    driver.put("status.json", json.dumps(status).encode())
    return driver


def names(url: str) -> set[str]:
    return {name for name, _ in urls.open_folder(url).objects()}


def test_a_run_is_removed_and_its_neighbours_stay(bucket, capsys):
    stored(f"{bucket}/runs/a")
    stored(f"{bucket}/runs/ab")
    runs.main(["rm", f"{bucket}/runs/a", "yes=true"])
    assert capsys.readouterr().out.startswith(f"removed {bucket}/runs/a, ")
    assert {name.partition("/")[0] for name in names(f"{bucket}/runs")} == {"ab"}


@pytest.mark.slow
def test_a_driver_that_wakes_up_after_the_removal_writes_nothing(bucket):
    driver = stored(f"{bucket}/a", state="running", time=time.time() - 3600)
    assert disk.remove(f"{bucket}/a").freed > 15
    for name in ("status.json", "metrics.jsonl"):
        with pytest.raises(TakenOver, match="the run was removed: this one ends"):
            driver.put(name, b"again")
    assert names(f"{bucket}/a") == set()


def test_a_run_that_goes_on_is_refused(bucket):
    stored(f"{bucket}/a", state="running")
    with pytest.raises(ConfigError, match=r"is running: end it first, with .* stop=true"):
        disk.remove(f"{bucket}/a")
    assert len(names(f"{bucket}/a")) == 5


def test_what_is_no_run_or_holds_others_is_refused(bucket):
    stored(f"{bucket}/runs/a")
    stored(f"{bucket}/runs/a/inner")
    for url, said in {
        f"{bucket}/runs": "holds no run: give the URL",
        f"{bucket}/runs/a": "holds other runs, too",
    }.items():
        with pytest.raises(ConfigError, match=said):
            disk.count(url)
        with pytest.raises(ConfigError, match=said):
            disk.remove(url)
    assert OWNER in names(f"{bucket}/runs/a")


def test_a_removal_that_was_cut_off_is_done_again(bucket, monkeypatch):
    stored(f"{bucket}/a")
    delete = FencedStore.delete

    def fails(store: FencedStore, name: str) -> None:
        if name == ".hydra/config.yaml":
            raise ConnectionError("no answer")
        delete(store, name)

    with monkeypatch.context() as patched:
        patched.setattr(FencedStore, "delete", fails)
        with pytest.raises(ConfigError, match="no answer: try again later"):
            disk.remove(f"{bucket}/a")
    assert names(f"{bucket}/a") == {".hydra/config.yaml", "status.json", OWNER}
    disk.remove(f"{bucket}/a")
    assert names(f"{bucket}/a") == set()
