from __future__ import annotations

import hashlib
import json
import logging
import time
from pathlib import Path

import pytest

from ddp_hydra.errors import ConfigError
from ddp_hydra.job.remote import uploader
from ddp_hydra.job.remote.driver import SCRATCH, keep
from ddp_hydra.job.remote.status import DriverStatus, FencedStore
from ddp_hydra.job.remote.uploader import Uploader, acquire_run
from ddp_hydra.job.run_dir import hydra_files
from ddp_hydra.record import Metrics, Record, Start
from ddp_hydra.run_state import Status
from ddp_hydra.storage import LocalFolder, Store
from ddp_hydra.storage.files import scratch_folder
from ddp_hydra.storage.manifest import CheckpointEntry, CheckpointPart, encode_manifest, read_manifest
from ddp_hydra.writers.run_dir import next_attempt, read_summary

ENTRY = CheckpointEntry(parts=[CheckpointPart(name="step-000001.pt", size=1, sha256="a" * 64)])


class Shaky(LocalFolder):
    """A store that is away now and then, and keeps the order of what comes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, setting=None)
        self.away = False
        self.order: list[str] = []

    def put(self, key, content):
        if self.away:
            raise ConnectionError("the store is away")
        super().put(key, content)
        self.order.append(key)

    def put_if(self, key, content, etag):
        if self.away:
            raise ConnectionError("the store is away")
        new_etag = super().put_if(key, content, etag)
        self.order.append(key)
        return new_etag


@pytest.fixture
def there(tmp_path) -> Shaky:
    return Shaky(tmp_path / "store")


@pytest.fixture
def run_dir(tmp_path) -> Path:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step":1}\n')
    (folder / "logs" / "rank-0.log").write_text("hello\n")
    (folder / "summary.json").write_text('{"status":"done"}')
    (folder / "status.json").write_text("{}")
    (folder / "logs" / ".part-123").write_text("half")
    return folder


@pytest.fixture
def status() -> DriverStatus:
    return DriverStatus("tcp://scheduler:8786", "abc")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("ddp_hydra.writers.checkpoint_mirror.INTERVAL_S", 0.01)


@pytest.fixture
def make(there, run_dir, status, quick):
    begun = []

    def make(on_stop=lambda reason: None) -> Uploader:
        begun.append(Uploader(run_dir, there, status, on_stop))
        begun[0].start()
        return begun[0]

    yield make
    for one in begun:
        one._end.set()
        for thread in one._threads:
            thread.join()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_files_come_as_they_grow_and_the_summary_last(make, there, run_dir):
    one = make()
    wait_until(lambda: {"logs/rank-0.log", "metrics.jsonl"} <= set(there.order))
    assert "summary.json" not in there.order
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step":2}\n')
    wait_until(lambda: there.get("metrics.jsonl").count(b"\n") == 2)
    (run_dir / "logs" / "rank-0.log").write_text("hello again\n")
    (run_dir / "old.hparams").write_text("of the attempt before")
    wait_until(lambda: "old.hparams" in there.order)
    (run_dir / "old.hparams").unlink()
    assert one.finish_run(0, "done", "well done") == ""
    assert there.order[-2:] == ["status.json", "summary.json"]
    assert there.get("logs/rank-0.log") == b"hello again\n"
    assert there.size_or_none("old.hparams") is None
    assert json.loads(there.get("status.json"))["files"] == ["logs/rank-0.log", "metrics.jsonl"]
    assert (json.loads(there.get("status.json"))["state"], there.size_or_none("logs/.part-123")) == ("done", None)


def test_a_large_file_is_not_brought_each_second(make, there, run_dir, monkeypatch):
    monkeypatch.setattr(uploader, "BYTES_PER_S", 0.001)
    one = make()
    wait_until(lambda: "metrics.jsonl" in there.order)
    wait_until(lambda: not one.is_behind())  # before checkpoints, the metrics are brought at once
    (run_dir / "metrics.jsonl").write_text("x" * 20)
    time.sleep(0.1)
    assert there.order.count("metrics.jsonl") == 1
    assert one.finish_run(0, "done", "") == ""
    assert there.size_or_none("metrics.jsonl") == 20


def test_a_store_that_was_away_gets_all(make, there, run_dir, caplog):
    there.away = True
    one = make()
    wait_until(lambda: "cannot be uploaded" in caplog.text)
    there.away = False
    # A second thread may tell its earlier failure after that.
    wait_until(lambda: any("store again" in said for said in caplog.messages) and "metrics.jsonl" in there.order)
    assert one.finish_run(0, "done", "") == ""


def test_a_checkpoint_waits_for_the_metrics_before_it(there, run_dir, status):
    one = Uploader(run_dir, there, status, lambda reason: None)
    content, name = b"weights", "step-000001.pt"
    part = CheckpointPart(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    entry = CheckpointEntry(parts=[part], step=1)
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / name).write_bytes(content)
    (run_dir / "checkpoints" / "manifest.json").write_bytes(encode_manifest({name: entry}))
    there.away = True
    with pytest.raises(ConnectionError, match="away"):
        one.copy()
    there.away = False
    one.copy()
    one.copy()
    assert there.order == [
        "metrics.jsonl", f"checkpoints/step-000001-{entry.digest[:12]}.pt", "checkpoints/manifest.json",
    ]  # fmt: skip


def test_a_folder_that_is_removed_meanwhile_is_no_end(make, there, run_dir, monkeypatch, caplog):
    calls = []

    def rglob(folder, pattern):
        calls.append(pattern)
        if len(calls) == 1:
            raise FileNotFoundError("a folder is gone")
        return [folder / "metrics.jsonl"]

    monkeypatch.setattr(Path, "rglob", rglob)
    make()
    wait_until(lambda: "metrics.jsonl" in there.order)
    wait_until(lambda: "a folder is gone" in caplog.text)  # another thread may have brought the file before it is told


def test_what_is_missing_at_the_end_is_said(make, there, run_dir, caplog):
    one = make()
    there.away = True
    (run_dir / "metrics.jsonl").write_text("more")
    assert one.finish_run(0.05, "done", "") == "the store is away"
    there.away = False
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "manifest.json").write_bytes(encode_manifest({"step-000001.pt": ENTRY}))
    assert one.finish_run(0, "done", "") == "its newest checkpoint, step-000001.pt, is not there"
    assert there.size_or_none("summary.json") is None


def test_a_request_that_a_store_does_not_have_is_not_repeated(make, there, monkeypatch):
    one = make()
    monkeypatch.setattr(there, "delete", Store.objects.__get__(there))
    began = time.monotonic()
    assert one.finish_run(60, "done", "") == "NotImplementedError"
    assert time.monotonic() - began < 30


def test_somebody_asks_for_the_end_once(make, there):
    asked = []
    one = make(asked.append)
    there.put("stop", b"")
    wait_until(lambda: asked)
    time.sleep(0.05)
    assert asked == ["it was asked for"]
    assert one.finish_run(0, "interrupted", "") == ""
    assert there.size_or_none("stop") is None


def test_a_run_acquires_its_place(there, status):
    there.put("summary.json", b"of before")
    there.put("stop", b"")
    acquire_run(FencedStore(there), status, {"config.yaml": b"a: 1\n"})
    assert (there.size_or_none("summary.json"), there.size_or_none("stop")) == (None, None)
    assert there.get(".hydra/config.yaml") == b"a: 1\n"
    with pytest.raises(ConfigError, match=r"another run is active in .*/store .*stop=true"):
        acquire_run(FencedStore(there), DriverStatus("tcp://scheduler:8786", "abc"), {})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("checkpoints/manifest.json", encode_manifest({"step-000001.pt": ENTRY})),
        ("status.json", b'{"state": "done", "time": 100.0}'),
    ],
)
def test_the_place_of_another_run_that_has_left_something_is_not_free(there, status, name, content):
    there.put(name, content)
    with pytest.raises(
        ConfigError, match=r"store holds another run: give hydra\.run\.dir=<folder>, or go on: resume=.*store"
    ):
        acquire_run(FencedStore(there), status, {})
    assert there.size_or_none("owner") is None
    acquire_run(FencedStore(there), status, {}, goes_on=True)


def test_a_run_that_is_resumed_in_its_folder_has_what_it_has_left_there(there, status, tmp_path):
    there.put("metrics.jsonl", b'{"step":1,"attempt":1}\n')
    there.put("logs/a=1.log", b"a")  # a logger chooses its names
    names = ["metrics.jsonl", ".hydra/overrides.yaml", "logs/a=1.log"]
    there.put("status.json", json.dumps({"state": "done", "files": names}).encode())
    there.put("summary.json", b'{"status": "done", "attempts": [{"attempt": 0}]}')
    there.put(".hydra/overrides.yaml", b"[]")
    there.put("checkpoints/manifest.json", encode_manifest({"step-000001.pt": ENTRY}))
    (own := tmp_path / "own").mkdir()
    acquire_run(FencedStore(there), status, {"overrides.yaml": b"[lr=1]"}, goes_on=True, own_dir=own)
    assert (own / "summary.json").read_bytes() == b'{"status": "done", "attempts": [{"attempt": 0}]}'
    assert there.get(".hydra/overrides.yaml") == b"[]", "until it trains"
    assert hydra_files(own) == {"overrides.yaml": b"[lr=1]"}
    assert (own / "logs" / "a=1.log").read_bytes() == b"a"
    assert [attempt.attempt for attempt in read_summary(own).attempts] == [0]
    assert (next_attempt(own), read_manifest(own / "checkpoints")) == (2, {"step-000001.pt": ENTRY})
    assert there.size_or_none("summary.json") is None


def test_a_dead_runs_place_is_free(there, status, monkeypatch):
    monkeypatch.setattr(uploader, "WATCH_S", 0.1)
    there.put("status.json", json.dumps({"state": "running", "time": time.time() - 100}).encode())
    acquire_run(FencedStore(there), status, {})


def test_a_live_run_with_a_wrong_clock_keeps_its_place(there, status, monkeypatch):
    times = iter(range(100))
    monkeypatch.setattr(uploader, "WATCH_S", 0.1)
    monkeypatch.setattr(uploader, "read", lambda _: Status(state="running", time=float(next(times))))
    with pytest.raises(ConfigError, match="another run is active"):
        acquire_run(FencedStore(there), status, {})


def test_who_is_taken_over_stops_and_writes_nothing_more(there, run_dir, status, quick):
    """Also where it has put an object before, and in the middle of it all."""
    said = []
    mine, other = FencedStore(there), FencedStore(there)
    mine.acquire(mine.owner())
    one = Uploader(run_dir, mine, status, said.append)
    one.start()
    wait_until(lambda: {"logs/rank-0.log", "metrics.jsonl"} <= set(there.order))
    other.acquire(other.owner())
    other.put("metrics.jsonl", b"of the other")
    status.now.state = "running"  # news
    wait_until(lambda: said)
    (run_dir / "metrics.jsonl").write_text("more of mine")
    assert "another driver has taken over" in one.finish_run(60, "done", "")
    assert len(said) == 1
    assert there.get("metrics.jsonl") == b"of the other"
    assert there.size_or_none("summary.json") is None


def test_the_status_follows_the_records(status):
    assert json.loads(status.next_update())["state"] == "starting"
    assert status.next_update() is None
    status.write(Record(Start(lines=["a job"], total_steps=10)))
    status.write(Record(Metrics({"train/loss": float("nan")}), step=3))
    said = json.loads(status.next_update())
    assert (said["state"], said["step"], said["total_steps"]) == ("running", 3, 10)
    assert said["metrics"] == {"train/loss": None}
    assert said["start"]["data"]["lines"] == ["a job"]


def test_a_folder_of_a_dead_driver_is_removed_and_that_of_a_live_one_is_not(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    dead = tmp_path / "ddp_hydra-run-dead"
    with scratch_folder(SCRATCH, str(tmp_path)) as live:
        dead.mkdir()
        (dead / ".lock").touch()
        (dead / "x").touch()
        with scratch_folder(SCRATCH, str(tmp_path)) as other:
            assert live.is_dir()
            assert not dead.exists()
            (other / "y").touch()
            kept = Path(keep(other))
    assert (kept / "y").is_file()
    with scratch_folder(SCRATCH, str(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == [kept]
