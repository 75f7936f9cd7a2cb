"""The loggers of a job: the names of its runs, the file for a resume, and how the session ends."""

from __future__ import annotations

import time

import pytest
from omegaconf import OmegaConf

from ddp_hydra.job import loggers
from tests.ddp_hydra.job.jobs import config


@pytest.mark.parametrize(
    ("path", "parts", "name"),
    [
        ("/home/me/outputs/2026-08-01/12-00-00-1", 2, "2026-08-01/12-00-00-1"),
        ("/home/me/outputs/mine", 2, "mine"),
        ("/home/me/runs/mine", 2, "runs/mine"),
        ("/home/me/multirun/2026-08-01/12-00-00-1/3", 3, "2026-08-01/12-00-00-1/3"),
        ("s3://bucket/runs/2026-08-01/12-00-00-1", 2, "2026-08-01/12-00-00-1"),
        ("/x", 2, "x"),
    ],
)
def test_a_run_is_called_by_the_end_of_its_folder(path, parts, name):
    assert loggers.short_name(path, parts) == name


RUNS = {"mlflow": {"id": "abc", "url": ""}}


@pytest.mark.parametrize("resume", [".", "checkpoints", "checkpoints/last.pt"])
def test_the_runs_of_a_job_are_found_by_what_it_resumes_from(resume, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    loggers.save_runs(tmp_path, RUNS)
    assert loggers.read_runs(str(tmp_path / resume)) == RUNS


def test_a_run_without_loggers_has_no_runs(tmp_path):
    assert loggers.read_runs(str(tmp_path)) == loggers.read_runs(str(tmp_path / "no" / "where")) == {}


@pytest.mark.parametrize("content", ["{", "[1]", '{"mlflow": 1}', "\x80"])
def test_a_broken_file_begins_new_runs_with_a_warning(content, tmp_path, caplog):
    (tmp_path / loggers.RUNS).write_text(content, encoding="latin1")
    assert loggers.read_runs(str(tmp_path)) == {}
    assert "the loggers begin new runs" in caplog.text


@pytest.mark.parametrize("is_new", [False, True])
def test_a_resumed_job_continues_its_runs_unless_new_ones_are_wanted(is_new, tmp_path):
    loggers.save_runs(tmp_path, RUNS)
    cfg = config(resume=str(tmp_path), results__loggers=["mlflow"], results__new_logger_runs=is_new)
    assert loggers.describe(cfg, tmp_path / "b").earlier == ({} if is_new else RUNS)


class Sender:
    """Stands for a logger's process."""

    def __init__(self, missing: str = "", is_away: bool = False, error: BaseException | None = None):
        self.name, self.missing, self.error = "mine", missing, error
        self.away_since = 0.0 if is_away else None
        self.status, self.limit_s, self.is_killed = "", 0.0, False

    def finish(self, status: str) -> None:
        self.status = status

    def has_ended(self, until: float) -> bool:
        return True

    def wait(self, until: float) -> str:
        self.limit_s = until - time.monotonic()
        if self.error:
            raise self.error
        return self.missing

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(
    ("status", "is_away", "limit_s"),
    [("finished", False, 30), ("failed", False, 30), ("finished", True, 3), ("killed", False, 10), ("killed", True, 3)],
)
def test_the_end_waits_less_where_waiting_is_no_use(status, is_away, limit_s):
    sender = Sender(is_away=is_away)
    loggers.end([sender], status, 30)
    assert sender.status == status
    assert limit_s - 20 < sender.limit_s <= limit_s
    assert sender.is_killed


def test_the_wait_is_short_too_where_it_shows_only_at_the_end_that_a_service_is_away():
    class Slow(Sender):
        def has_ended(self, until: float) -> bool:
            was_away, self.away_since = self.away_since is not None, time.monotonic()
            return was_away

    sender = Slow()
    loggers.end([sender], "finished", 30)
    assert 0 < sender.limit_s <= loggers.AWAY_S


def test_what_is_missing_is_said(caplog):
    loggers.end([Sender("it was slow")], "finished", 1)
    assert "mine lacks records of this job: it was slow. More time" in caplog.text


def test_ctrl_c_ends_the_wait_and_all_loggers():
    senders = [Sender(error=KeyboardInterrupt()), Sender()]
    with pytest.raises(KeyboardInterrupt):
        loggers.end(senders, "finished", 30)
    assert all(sender.is_killed for sender in senders)


def test_a_logger_that_cannot_be_started_leaves_none_of_the_others_behind(tmp_path, monkeypatch):
    one, names = Sender(), []

    def start(name, *_):
        names.append(name)
        if name == "second":
            raise OSError("no memory for a process")
        return one

    monkeypatch.setattr(loggers, "LoggerProcess", start)
    nodes = [{"_target_": "mine.first"}, {"_target_": "mine.second"}]
    results = {"loggers": nodes, "loggers_timeout_s": 1.0, "new_logger_runs": False}
    cfg = OmegaConf.create({"results": results, "resume": None, "tags": []})
    with (
        pytest.raises(OSError, match="no memory"),
        loggers.session(cfg, tmp_path, loggers.LoggedJob("run", earlier=RUNS)),
    ):
        pass
    assert names == ["first", "second"]
    assert (one.status, one.is_killed) == ("failed", True)
    assert loggers.read_runs(str(tmp_path)) == RUNS  # known while the services are away
