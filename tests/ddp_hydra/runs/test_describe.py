"""Whether a run goes on: what its lock, status.json and summary.json say together."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest
from msgspec import convert

from ddp_hydra.api import Run
from ddp_hydra.run_state import Best, Objective, Status, Summary
from ddp_hydra.runs.describe import UNREADABLE, RunState, row_of, status_of, stored_status
from ddp_hydra.runs.run_files import LocalRunFiles
from ddp_hydra.writers import run_dir
from ddp_hydra.writers.run_dir import LOCK, is_locked, locked
from tests.ddp_hydra.runs.conftest import kill
from tests.support.clocks import set_time


@pytest.mark.medium
@pytest.mark.parametrize("end", ["done", "failed"])
def test_a_run_that_has_ended_has_said_how(make_run, end):
    run_dir = make_run("run", end=end)
    assert status_of(run_dir) == Run(run_dir).status == end


def test_a_run_is_compared_by_its_best_checkpoint(tmp_path):
    summary = Summary(status="done", objective=Objective("val/loss", "minimize"), metrics={"val/loss": 0.5})
    files = LocalRunFiles(tmp_path)
    assert row_of(files, RunState(summary, None)).value == 0.5
    summary.best = Best(3, 0.25)
    assert row_of(files, RunState(summary, None)).value == 0.25
    now = Status(state="running", metrics={"val/loss": 0.75}, objective=summary.objective)
    assert row_of(files, RunState(summary, now)).value == 0.75, "of the run that goes on"


def test_a_process_that_is_killed_leaves_a_killed_run(tmp_path, process_of):
    process = process_of(tmp_path)
    assert (is_locked(tmp_path), status_of(tmp_path)) == (True, "running")
    kill(process)
    assert (tmp_path / LOCK).exists()
    assert (is_locked(tmp_path), status_of(tmp_path)) == (False, "killed")


@pytest.mark.medium
def test_a_run_that_is_resumed_in_its_folder_and_killed_is_not_what_it_was_before(make_run, process_of):
    run_dir = make_run("run", end="interrupted")
    os.utime(run_dir / "summary.json", (1e9, 1e9))
    process = process_of(run_dir)
    assert status_of(run_dir) == "running"
    kill(process)
    assert status_of(run_dir) == "killed"


def test_a_lock_of_another_host_counts_for_a_while(tmp_path):
    (tmp_path / LOCK).write_text("process 7 on elsewhere")
    (tmp_path / "status.json").write_text('{"state": "running"}')
    assert status_of(tmp_path) == "running"
    for name in (LOCK, "status.json"):
        os.utime(tmp_path / name, (1e9, 1e9))
    assert status_of(tmp_path) == "lost"


def test_a_file_system_without_locks_cannot_tell(tmp_path, monkeypatch):
    def refuse(handle: int, operation: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path):
        assert is_locked(tmp_path) is None
        assert status_of(tmp_path) == "running"


@pytest.mark.parametrize(
    ("state", "age", "found"),
    [
        ("running", 1, "running"),
        ("running", 60, "lost"),
        ("ending", 0, "running"),
    ],
)
def test_a_driver_that_falls_silent_is_lost(tmp_path, state, age, found):
    content = {"state": state, "scheduler": "tcp://a:1", "time": time.time() - age}
    (tmp_path / "status.json").write_text(json.dumps(content))
    (tmp_path / LOCK).touch()  # of the store
    assert status_of(tmp_path) == stored_status("", convert(content, Status)) == found


@pytest.mark.medium
@pytest.mark.parametrize("content", ["{", "{}", '{"format": 99, "status": "done", "ddp_hydra": "9.0"}'])
def test_a_summary_that_cannot_be_read_is_no_end(make_run, process_of, content):
    run_dir = make_run("run", end="done")
    (run_dir / "summary.json").write_text(content)
    assert status_of(run_dir) == "unreadable"
    (run_dir / LOCK).touch()  # of a process that has been killed since
    assert status_of(run_dir) == "unreadable"
    process_of(run_dir)
    assert status_of(run_dir) == "running"


def test_a_run_of_a_driver_whose_files_cannot_be_read_is_neither_running_nor_unknown(tmp_path):
    (tmp_path / "status.json").write_text('{"state": 1, "scheduler": "tcp://a:1"}')
    (tmp_path / LOCK).touch()
    assert status_of(tmp_path) == stored_status(UNREADABLE, None) == "unreadable"
    alive = Status(state="running", scheduler="tcp://a:1", time=time.time())
    assert stored_status(UNREADABLE, alive) == "running"
    assert stored_status(UNREADABLE, Status(state="done")) == "unreadable"


def test_others_have_a_word_too(tmp_path):
    (tmp_path / ".hydra").mkdir()
    assert status_of(tmp_path) == "unknown"
    (tmp_path / "results.url").write_text("s3://bucket/a")
    assert status_of(tmp_path) == "detached"
    assert status_of(tmp_path / "missing") == "unknown"
    assert stored_status("", None) == "unknown"


def test_a_refused_command_does_not_change_how_the_run_has_ended():
    assert stored_status("done", Status(state="failed")) == "done"
    assert stored_status("", Status(state="failed")) == "failed"
    assert stored_status("done", Status(state="running", time=time.time())) == "running"


def test_a_look_does_not_keep_a_job_from_its_folder(tmp_path, monkeypatch):
    """Whoever looks holds the lock for an instant, and may not be taken for another job."""
    with (tmp_path / LOCK).open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        set_time(monkeypatch, run_dir, sleep=lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        with locked(tmp_path):
            assert is_locked(tmp_path)


def test_a_lock_that_is_a_link_or_a_pipe_is_no_lock(tmp_path):
    (tmp_path / LOCK).symlink_to("/etc/passwd")
    assert is_locked(tmp_path) is None
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    assert is_locked(Path(tmp_path)) is False
