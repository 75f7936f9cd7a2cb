"""status.json: where a job is, while it runs."""

from __future__ import annotations

import json

from ddp_hydra.record import Record, Start
from ddp_hydra.run_state import AttemptEntry, Status
from ddp_hydra.writers import run_dir
from ddp_hydra.writers.run_dir import StatusWriter
from tests.support.clocks import set_time


def read(folder):
    return json.loads((folder / "status.json").read_text())


def test_it_says_where_the_job_is_and_goes_when_that_has_ended(tmp_path, metrics_record, monkeypatch):
    now = [0.0]
    set_time(monkeypatch, run_dir, monotonic=lambda: now[0])
    writer = StatusWriter(tmp_path)
    writer.write(Record(Start(total_steps=100, epochs=4, world_size=2), step=0))
    assert (read(tmp_path)["world_size"], read(tmp_path)["step"]) == (2, None)
    now[0] = 10.0
    writer.write(metrics_record(20, train__loss=0.5))
    status = read(tmp_path)
    assert (status["step"], status["total_steps"], status["epoch"], status["epochs"]) == (20, 100, 1, 4)
    assert (status["eta_s"], status["metrics"]["train/loss"]) == (40.0, 0.5)
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_no_more_than_twice_a_second_but_a_new_attempt_shows_at_once(
    tmp_path, metrics_record, monkeypatch
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
