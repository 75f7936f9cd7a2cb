from __future__ import annotations

import json

import pytest

from ddp_hydra.errors import ConfigError, Interrupted, RunFailed
from ddp_hydra.job.remote import client
from ddp_hydra.job.remote.client import Attached
from ddp_hydra.job.remote.status import DriverStatus
from ddp_hydra.record import Metrics, Record, Start
from ddp_hydra.storage import Store, urls
from ddp_hydra.writers.run_dir import encode_status
from tests.support.clocks import set_time


class Run:
    """A run as its store shows it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.status = DriverStatus("tcp://scheduler:8786", "abc")
        self.lines = b""
        self.time_s = 0.0

    def start(self, attempt=0, step=0):
        start = Start(lines=["model  \x1b[31mTiny"], total_steps=10, epochs=2)
        self.status.write(Record(start, step=step, attempt=attempt))
        self.beat()

    def step(self, step, attempt=0, **metrics):
        epoch = (step + 4) // 5
        self.status.write(Record(Metrics(metrics=metrics, epoch=epoch), step=step, attempt=attempt))
        self.time_s += 1
        line = {"time": self.time_s, "attempt": attempt, "step": step, "epoch": epoch, "samples": step * 8, **metrics}
        self.lines += json.dumps(line).encode() + b"\n"
        self.store.put("metrics.jsonl", self.lines)
        self.beat()

    def beat(self):
        self.store.put("status.json", encode_status(self.status.content()))

    def end(self, state, message):
        self.status.now.state, self.status.now.message = state, message
        self.beat()
        self.store.put("summary.json", b"{}")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("ddp_hydra.job.remote.client.POLL_S", 0.01)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(urls.open_folder(str(tmp_path)))


def following(run: Run, lost_timeout_s: float = 5.0) -> Attached:
    attached = Attached(run.store, lost_timeout_s)
    attached.begin()
    attached.show_metrics()
    return attached


@pytest.mark.parametrize("reached", [5, 7], ids=["after an epoch", "amid one"])
def test_it_begins_with_where_the_run_stands_and_goes_on(run, capsys, reached):
    run.start()
    for step in range(1, reached + 1):
        run.step(step, **{"train/loss": 1 / step, **({"val/loss": 0.5} if step == 5 else {})})
    attached = following(run)
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["  model  Tiny", "epoch 1/2  train/loss 0.2  val/loss 0.5"]
    for step in range(reached + 1, 11):
        run.step(step, **{"train/loss": 1 / step, **({"val/loss": 0.25} if step == 10 else {})})
    run.end("done", "done: 10 steps")
    attached.follow()
    assert capsys.readouterr().out.splitlines() == ["epoch 2/2  train/loss 0.1  val/loss 0.25", "done: 10 steps"]


def test_it_begins_with_what_rank_0_said_although_others_spoke_later(run, capsys):
    run.start()
    run.step(1, **{"train/loss": 1.0})
    run.lines += b'{"time":2.0,"attempt":0,"step":3,"rank":1,"train/loss":9.0}\n'
    run.store.put("metrics.jsonl", run.lines)
    attached = following(run)
    run.end("done", "done")
    attached.follow()
    assert capsys.readouterr().out.splitlines() == ["  model  Tiny", "epoch 1/2  train/loss 1", "done"]


@pytest.mark.medium
@pytest.mark.parametrize("further", [6, 8])
def test_a_restart_shows_each_epoch_once(run, capsys, further):
    """It cuts the file, which has grown beyond its old size, or not, until it is looked at."""
    run.start()
    run.step(1, loss=1.0)
    attached = following(run)
    kept = []
    for step in range(2, 7):
        run.step(step, loss=1.0, **({"val/loss": 0.1} if step == 4 else {}))
        kept.append(run.lines)
    attached.show_metrics()
    run.lines = kept[3]  # those up to step 5
    run.start(attempt=1, step=5)
    for step in range(6, further + 1):
        run.step(step, attempt=1, loss=1.0, **({"val/loss": 6.0} if step == 6 else {}))
    run.end("done", "done")
    attached.follow()
    shown = capsys.readouterr().out
    assert shown.count("val/loss 0.1") == 1
    assert shown.splitlines()[-3:] == ["restart 1, from step 5", "epoch 2/2  val/loss 6", "done"]


def test_a_restart_is_shown_with_the_step_where_it_began(run, capsys):
    run.start(attempt=1, step=5)
    for step in range(6, 10):
        run.step(step, attempt=1, loss=1.0)
    attached = following(run)
    run.end("done", "done")
    attached.follow()
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["restart 1, from step 5", "  model  Tiny"]
    assert len([line for line in shown if line in ("  model  Tiny", "restart 1, from step 5")]) == 2


def test_another_run_in_the_same_folder_is_shown_from_its_begin(run, capsys):
    run.start()
    for step in range(1, 7):
        run.step(step, loss=1.0)
    attached = following(run)
    run.lines = b""
    run.step(1, **{"loss": 1.0, "val/loss": 0.25})
    run.end("done", "done")
    attached.follow()
    assert "epoch 1/2  val/loss 0.25" in capsys.readouterr().out


@pytest.mark.parametrize(("state", "error"), [("failed", RunFailed), ("interrupted", Interrupted)])
def test_it_ends_as_the_run_did(run, state, error):
    run.start()
    run.end(state, "rank 1 failed:\x1b[31m boom")
    attached = following(run)
    with pytest.raises(error, match=r"^rank 1 failed: boom$"):
        attached.follow()


def test_a_driver_that_says_nothing_is_missed_and_one_that_beats_is_not(run, monkeypatch):
    run.start()
    now, beats = 0.0, 20

    def sleep(_):
        nonlocal now, beats
        now += 1.0
        if beats:
            beats -= 1
            run.beat()

    set_time(monkeypatch, client, monotonic=lambda: now, sleep=sleep)
    attached = following(run, 1.5)
    with pytest.raises(RunFailed, match=r"driver, process \d+ on .*, has not updated its status for 1.5 s: .*resume=/"):
        attached.follow()
    assert beats == 0
    assert 20 < now < 25


def test_where_there_is_no_run(run):
    with pytest.raises(ConfigError, match=r"there is no run of .*: it has no status.json"):
        Attached(run.store, 1).begin()


def test_nonsense_of_a_store_is_no_crash(run, caplog, capsys):
    run.start()
    run.store.put("metrics.jsonl", b'[1]\n{"step": "x", "epoch": 1, "a": 1}\nhalf')
    run.end("done", "done")
    following(run).follow()
    assert capsys.readouterr().out.splitlines()[-1] == "done"


def test_to_stop_leaves_a_word_in_the_store(run):
    run.start()
    attached = Attached(run.store, 1)
    attached.begin()
    attached.stop()
    assert run.store.size_or_none("stop")
    run.store.delete("stop")
    run.end("done", "")
    attached.begin()
    attached.stop()
    assert run.store.size_or_none("stop") is None
