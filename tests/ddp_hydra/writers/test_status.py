"""status.json: where a job is, while it runs."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

from ddp_hydra.record import Metrics, Record, Start, Up
from ddp_hydra.run_state import AttemptEntry, Status
from ddp_hydra.writers import run_dir
from ddp_hydra.writers.run_dir import StatusWriter
from tests.support.clocks import set_time


def read(folder):
    return json.loads((folder / "status.json").read_text())


class Timer:
    """Elapses when the test says so."""

    def __init__(self, wait_s, function):
        self.wait_s, self.function, self.state = wait_s, function, "new"

    def start(self):
        self.state = "started"

    def cancel(self):
        self.state = "ended"

    def join(self):
        assert self.state == "ended"


@pytest.fixture
def timers(monkeypatch):
    made = []

    def elapse(timer):
        monkeypatch.setattr(fake, "current_thread", lambda: timer)
        timer.function()

    fake = SimpleNamespace(
        **{**vars(threading), "Timer": lambda *given: made.append(Timer(*given)) or made[-1]}, elapse=elapse, made=made
    )
    monkeypatch.setattr(run_dir, "threading", fake)
    return fake


def test_it_says_where_the_job_is_and_goes_when_that_has_ended(tmp_path, metrics_record, monkeypatch):
    now = [0.0]
    set_time(monkeypatch, run_dir, monotonic=lambda: now[0])
    writer = StatusWriter(tmp_path)
    writer.write(Record(Start(total_steps=100, epochs=4, world_size=2), step=0))
    assert (read(tmp_path)["world_size"], read(tmp_path)["step"]) == (2, 0)
    now[0] = 10.0
    writer.write(metrics_record(20, train__loss=0.5))
    status = read(tmp_path)
    assert (status["step"], status["total_steps"], status["epoch"], status["epochs"]) == (20, 100, 1, 4)
    assert (status["eta_s"], status["metrics"]["train/loss"]) == (40.0, 0.5)
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_no_more_than_twice_a_second_but_a_new_attempt_shows_at_once(
    tmp_path, metrics_record, monkeypatch, timers
):
    now = [0.0]
    set_time(monkeypatch, run_dir, monotonic=lambda: now[0])
    base = Status()
    writer = StatusWriter(tmp_path, base)
    writer.write(metrics_record(1, loss=1.0))
    assert read(tmp_path)["attempts"] == []
    base.attempts = [AttemptEntry(attempt=3)]
    now[0] = 0.4
    writer.write(metrics_record(2, loss=1.0))
    writer.write(metrics_record(2, rank=1, loss=1.0))
    assert read(tmp_path)["step"] == 1
    writer.write(Record(Start(world_size=1), step=1, attempt=1))
    assert (read(tmp_path)["attempt"], read(tmp_path)["world_size"]) == (1, 1)
    assert [one["attempt"] for one in read(tmp_path)["attempts"]] == [3]
    now[0] = 0.9
    writer.write(metrics_record(3, attempt=1, loss=float("nan")))
    assert (read(tmp_path)["step"], read(tmp_path)["metrics"]["loss"]) == (3, None)
    writer.close()


def test_where_it_cannot_be_written_nothing_happens(tmp_path, metrics_record):
    writer = StatusWriter(tmp_path / "missing")
    writer.write(metrics_record(1, loss=1.0))
    writer.close()


def test_the_last_record_is_written_although_no_other_one_follows(tmp_path, metrics_record, monkeypatch, timers):
    now = [0.0]
    set_time(monkeypatch, run_dir, monotonic=lambda: now[0])
    writer = StatusWriter(tmp_path)
    writer.write(metrics_record(1, train__loss=1.0))
    now[0] = 0.25
    writer.write(metrics_record(1, val__loss=0.5))
    writer.write(metrics_record(1, val__accuracy=0.75))
    assert read(tmp_path)["metrics"] == {"train/loss": 1.0}
    assert [timer.wait_s for timer in timers.made] == [0.25]
    now[0] = 0.5
    timers.elapse(timers.made[0])
    assert read(tmp_path)["metrics"] == {"train/loss": 1.0, "val/loss": 0.5, "val/accuracy": 0.75}
    now[0] = 0.75
    writer.write(metrics_record(2, train__loss=0.5))
    writer.write(Record(Start(), step=1, attempt=1))
    assert timers.made[1].state == "ended", "it has nothing left to write"
    before = read(tmp_path)
    timers.elapse(timers.made[1])
    assert read(tmp_path) == before
    writer.write(metrics_record(2, attempt=1, train__loss=0.5))
    writer.close()
    timers.elapse(timers.made[2])
    assert list(tmp_path.iterdir()) == []
    assert [timer.state for timer in timers.made] == ["ended"] * 3


def test_a_disk_that_is_full_when_the_last_record_is_written_says_nothing(tmp_path, metrics_record, caplog):
    (tmp_path / "folder").mkdir()
    writer = StatusWriter(tmp_path / "folder")
    for step in (1, 2):
        writer.write(metrics_record(step, loss=1.0))
    timer = writer._timer
    (tmp_path / "folder" / "status.json").unlink()
    (tmp_path / "folder").rmdir()
    timer.function()
    writer.close()
    assert not timer.is_alive()
    assert not caplog.text


def test_no_thread_is_needed(tmp_path, metrics_record, monkeypatch, timers):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Timer, "start", start)
    writer = StatusWriter(tmp_path)
    for step in (1, 2):
        writer.write(metrics_record(step, loss=1.0))
    assert read(tmp_path)["step"] == 1
    writer.close()


def test_an_attempt_begins_at_its_step_with_what_is_known(tmp_path, metrics_record):
    base = Status(metrics={"val/loss": 0.25, "train/loss": 9.0, "train_epoch/loss": 2.0, "lr": None})
    writer = StatusWriter(tmp_path, base)
    known = {"val/loss": 0.25, "train/loss": 2.0, "lr": None}
    assert read(tmp_path)["metrics"] == known
    writer.write(Record(Start(world_size=1), step=30, attempt=1))
    assert (read(tmp_path)["step"], read(tmp_path)["metrics"]) == (30, known)
    writer.write(Record(Start(), step=30, attempt=2))
    writer.write(Record(Metrics({"val/loss": 0.5}), step=31, attempt=2))
    writer.write(Record(Start(), step=30, attempt=3))
    assert read(tmp_path)["metrics"] == known, "step 31 is done again"
    writer.close()


def test_a_users_function_has_its_ranks_and_failed_attempts(tmp_path, metrics_record):
    base = Status()
    writer = StatusWriter(tmp_path, base)
    base.world_size = 2
    writer.write(Record(Up()))
    assert (read(tmp_path)["state"], read(tmp_path)["world_size"]) == ("starting", 2)
    writer.write(metrics_record(9, loss=1.0))
    base.attempts = [AttemptEntry(attempt=0)]
    writer.write(Record(Up(), attempt=1))
    found = read(tmp_path)
    assert (found["attempt"], found["step"], found["metrics"]) == (1, None, {"loss": 1.0})
    assert [one["attempt"] for one in found["attempts"]] == [0]
    writer.close()
