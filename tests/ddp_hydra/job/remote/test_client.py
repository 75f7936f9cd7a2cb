"""The client of a driver: what it refuses, and what it says where a worker, the driver or the scheduler is gone."""

from __future__ import annotations

import queue
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from ddp_hydra.api import ComposedConfig
from ddp_hydra.cli import commands
from ddp_hydra.config.project import Project
from ddp_hydra.errors import ClusterError, ConfigError
from ddp_hydra.job.remote import client as remote
from ddp_hydra.job.remote.client import Follower, StartedDriver
from ddp_hydra.job.remote.start_driver import DriverSpec
from ddp_hydra.job.run_dir import earlier_kept, hold, hydra_files
from ddp_hydra.record import Record, Start
from ddp_hydra.run_state import Summary
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.storage.urls import POINTER
from ddp_hydra.writers.run_dir import read_summary

pytestmark = pytest.mark.medium
SPEC = SimpleNamespace(name="run-1", url="s3://bucket/run-1")
DRIVER = StartedDriver(SPEC, "client-9", "tcp://10.0.0.2:5")  # type: ignore[arg-type]


@pytest.fixture
def follower(tmp_path):
    client = SimpleNamespace(status="running", logged=[])
    client.log_event = lambda topic, message: client.logged.append(message)
    found = Follower(client, DRIVER, queue.Queue(), tmp_path, Summary(status="failed"))  # type: ignore[arg-type]
    yield found
    found.handler.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster=inline"], "results.handler=cluster needs a cluster, and cluster=inline is none"),
        (["detach=true"], "detach=true needs a cluster that stays"),
    ],
)
def test_what_no_driver_can_run_is_refused(words, said, tmp_path, monkeypatch):
    commands.write_project(tmp_path)
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.setattr("ddp_hydra.config.project.make_importable", lambda roots: None)
    with pytest.raises(ConfigError, match=said):
        remote.check(ComposedConfig(["results.handler=cluster", f"results.root={tmp_path}", *words]).cfg)


def test_a_driver_starts_on_a_worker_that_runs():
    def client(**states: str) -> Any:
        workers = {name: {"status": state} for name, state in states.items()}
        return SimpleNamespace(status="closed", scheduler_info=lambda n_workers: {"workers": workers})

    assert {remote._choose_worker(client(a="running", b="paused", c="running")) for _ in range(50)} == {"a", "c"}
    with pytest.raises(ClusterError, match="the cluster has no worker that runs"):
        remote._choose_worker(client(b="paused"))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (TimeoutError(), ClusterError, "worker w did not start the run: TimeoutError"),
        (OSError("lost"), ClusterError, "worker w did not start the run: lost"),
        (ImportError("no module"), ConfigError, r"worker w: no module: install the version"),
        ({"error": "no room\x1b[31m"}, ConfigError, r"^on worker w: no room[^\x1b]*$"),
    ],
)
def test_a_worker_that_does_not_start_it(error, kind, said):
    def sync(*args: Any, **kwargs: Any) -> Any:
        if isinstance(error, Exception):
            raise error
        return {"w": error}

    client = SimpleNamespace(sync=sync, _run=None)
    with pytest.raises(kind, match=said):
        remote._start(client, "w", SimpleNamespace(name="run-1", url="s3://bucket/run-1"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "detach", "is_told"),
    [
        (KeyboardInterrupt(), True, True),
        (ClusterError("worker w did not start the run"), True, True),
        (KeyboardInterrupt(), False, False),
        (ConfigError("on worker w: no room"), True, False),
    ],
)
def test_a_detached_run_that_may_have_started_is_known(error, detach, is_told, tmp_path, monkeypatch, capsys):
    def start(client: object, worker: str, spec: DriverSpec) -> None:
        assert spec.expected == 2
        raise error

    cfg = OmegaConf.create(
        {
            "cluster": {"n_workers": 2}, "detach": detach, "resume": None, "tags": [], "dispatch": {"max_restarts": 3},
            "results": {"root": f"{tmp_path}/store", "loggers": [], "new_logger_runs": False},
        }
    )  # fmt: skip
    monkeypatch.setattr(remote, "check", lambda _: None)
    monkeypatch.setattr(remote.schema, "resolved", lambda _: {})
    monkeypatch.setattr(remote.checkpoint_config, "stored_config", lambda _: {})
    monkeypatch.setattr(remote.job_config, "packed_project", lambda *_: Project("abc", b""))
    monkeypatch.setattr(remote.connect, "connect", lambda *_: nullcontext(SimpleNamespace(id="client-1")))
    monkeypatch.setattr(remote, "_choose_worker", lambda _: "w")
    monkeypatch.setattr(remote.workers.WorkerCaller, "call", lambda *_: None)
    monkeypatch.setattr(remote, "_start", start)
    run_dir = tmp_path / "run"
    with pytest.raises(type(error)), remote.started_driver(cfg, run_dir, [], {}):
        pass
    said = capsys.readouterr().out
    assert ("end it:      ddp-hydra attach run=" in said) is is_told
    if is_told:
        assert RunRef.named(str(run_dir)).place.startswith(f"{tmp_path}/store")
    if isinstance(error, ConfigError):
        assert not (run_dir / POINTER).exists()
        (run_dir / POINTER).write_text("s3://bucket/earlier\n")
        with pytest.raises(ConfigError), remote.started_driver(cfg, run_dir, [], {}):
            pass
        assert (run_dir / POINTER).read_text() == "s3://bucket/earlier\n"
    (run_dir / POINTER).write_text("s3://bucket/earlier\n")
    with earlier_kept(run_dir):
        hold(run_dir, {".hydra/overrides.yaml": b"[lr=1]"})
        assert hydra_files(run_dir) == {"overrides.yaml": b"[lr=1]"}
        with pytest.raises(type(error)), remote.started_driver(cfg, run_dir, [], {}):
            pass
    assert (run_dir / ".hydra").exists() is is_told, "who may have started a run has its words"
    assert ((run_dir / POINTER).read_text() == "s3://bucket/earlier\n") is not is_told


def test_lines_are_logged_and_the_last_message_is_the_end(follower, caplog):
    caplog.set_level("INFO")
    end = {"message": "all well\x07", "summary": {"status": "done", "steps": 3}}
    for message in ({"line": "rank 1: hello\x1b[2J", "level": 20}, {"level": 20}, end):
        follower.messages.put(message)
    follower.messages.put("not reached")
    message, summary = follower._receive_all()
    assert summary == Summary(status="done", steps=3)
    assert "\x07" not in message
    assert "rank 1: hello" in caplog.text
    assert "\x1b" not in caplog.text
    assert "a message of the driver cannot be read" in caplog.text


def test_a_driver_that_is_gone(follower):
    follower.messages.put(None)
    with pytest.raises(ClusterError, match=r"driver, of tcp://10.0.0.2:5, is gone: .*resume=s3://bucket/run-1"):
        follower._receive_all()


def test_a_scheduler_that_is_lost(follower):
    follower.client.status = "closed"
    with pytest.raises(ClusterError, match=r"scheduler is lost: .*resume=s3://bucket/run-1"):
        follower._receive_all()


def test_a_run_that_begins_writes_what_was_held_back(follower, tmp_path):
    with earlier_kept(tmp_path):
        hold(tmp_path, {".hydra/overrides.yaml": b"[lr=1]"})
        follower._handle({"line": "waits for workers", "level": 20})
        assert not (tmp_path / ".hydra").exists()
        follower._handle({"record": Record(Start(), step=4).encode()})
    assert (tmp_path / ".hydra" / "overrides.yaml").read_bytes() == b"[lr=1]"
    assert follower.summary.from_step == 4


def test_an_interrupt_is_passed_on_once_and_a_second_one_waits_no_longer(follower):
    follower.interrupts.wanted = True
    for _ in range(2):
        follower.messages.put({"line": "saving", "level": 20})
    follower.messages.put({"message": "", "summary": {"status": "interrupted"}})
    assert follower._receive_all()[1].status == "interrupted"
    assert follower.client.logged == [b"stop"]
    with pytest.raises(KeyboardInterrupt, match="the end of the run was not waited for; see s3://bucket/run-1"):
        follower._receive_all(until=time.monotonic() - 1)


def test_the_commands_that_are_shown_can_be_typed_whatever_the_folder_is_called(capsys):
    remote._print_commands("the run goes on", "/runs/my ä/1")
    assert "  ddp-hydra attach 'run=/runs/my ä/1'\n" in capsys.readouterr().out


def test_the_summary_names_the_store_where_the_end_is_not_waited_for(monkeypatch, tmp_path):
    def follow(*_):
        raise KeyboardInterrupt("the end of the run was not waited for")

    driver = SimpleNamespace(spec=SimpleNamespace(url="s3://bucket/run-1"))
    monkeypatch.setattr(remote, "started_driver", lambda *_: nullcontext((None, driver)))
    monkeypatch.setattr(remote, "Follower", lambda *_: SimpleNamespace(follow=follow))
    with pytest.raises(KeyboardInterrupt):
        remote.run_remote_job(OmegaConf.create({"tags": [], "detach": False}), tmp_path, [], {})
    summary = read_summary(tmp_path)
    assert (summary.results, summary.status, summary.interrupted) == ("s3://bucket/run-1", "interrupted", "interrupt")
