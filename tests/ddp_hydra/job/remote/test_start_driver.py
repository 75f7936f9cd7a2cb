"""What a driver and its client tell each other over the scheduler, and how each notices that the other is gone."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import pytest

from ddp_hydra.cluster.scheduler_plugin import LATE_S, delete_topics, is_connected
from ddp_hydra.job.remote import start_driver
from ddp_hydra.job.remote.start_driver import DriverSpec, EventChannel, liveness_watched, stop_topic, submit_guard
from ddp_hydra.job.remote.status import DriverStatus
from ddp_hydra.rank import outbox
from ddp_hydra.writers.run_dir import STATUS, encode_status
from tests.support.warm_server import local_client, wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(start_driver, "POLL_S", 0.01)
    monkeypatch.setattr(start_driver, "GONE_S", 0.05)


@pytest.mark.medium
def test_a_client_that_goes_is_noticed_once():
    scheduler, gone = SimpleNamespace(clients={"other": SimpleNamespace(last_seen=0.0)}), threading.Event()
    client = SimpleNamespace(run_on_scheduler=lambda call, name: call.function(name, dask_scheduler=scheduler))
    with liveness_watched(client, "other", gone.set):
        assert not gone.wait(0.2)
        scheduler.clients.clear()
        assert gone.wait(60)


def test_a_client_without_heartbeats_is_disconnected():
    aborted = []
    scheduler = SimpleNamespace(clients={}, remove_client=lambda name: scheduler.clients.pop(name))
    scheduler.client_comms = {"other": SimpleNamespace(abort=lambda: aborted.append("other"))}
    assert not is_connected("other", 5, dask_scheduler=scheduler)
    scheduler.clients["other"] = SimpleNamespace(last_seen=time.time())
    assert is_connected("other", 60, dask_scheduler=scheduler)
    scheduler.clients["other"].last_seen -= 100
    assert is_connected("other", dask_scheduler=scheduler)
    assert not is_connected("other", 60, dask_scheduler=scheduler)
    assert (scheduler.clients, aborted) == ({}, ["other"])


@pytest.mark.medium
def test_a_scheduler_that_does_not_answer_says_nothing_of_the_client():
    asked, gone = threading.Event(), threading.Event()

    def fail(call, name):
        asked.set()
        raise OSError("no answer")

    with liveness_watched(SimpleNamespace(run_on_scheduler=fail), "other", gone.set):
        assert asked.wait(60)
        assert not gone.wait(0.2)


def test_topics_are_deleted_after_a_while():
    topics, later = {"a": 1, "b": 2, "c": 3}, []
    scheduler = SimpleNamespace(
        loop=SimpleNamespace(call_later=lambda *call: later.append(call)), _broker=SimpleNamespace(_topics=topics)
    )
    delete_topics(["a", "b", "never written"], dask_scheduler=scheduler)
    assert topics == {"a": 1, "b": 2, "c": 3}
    for delay_s, call, *args in later:
        assert delay_s == LATE_S
        call(*args)
    assert topics == {"c": 3}


def test_lines_are_sent_while_the_scheduler_is_there(monkeypatch):
    sent = []
    client = SimpleNamespace(status="running", log_event=lambda topic, message: sent.append((topic, message)))
    client.run_on_scheduler = lambda call, topics: sent.append((call, topics))
    sender = EventChannel(client, "run-1")
    sender.emit(logging.LogRecord("x", logging.WARNING, "file", 1, "rank %d", (1,), None))
    sender.delete_topics()
    monkeypatch.setattr(logging, "raiseExceptions", False)
    sender.emit(logging.LogRecord("x", logging.WARNING, "file", 1, "%d files", ("many",), None))  # stops nobody
    client.status = "closed"
    sender.send(line="lost", level=20)
    sender.delete_topics()
    (topic, line), (call, topics) = sent
    assert (topic, line) == ("run-1", {"line": "rank 1", "level": logging.WARNING})
    assert (call.function, topics) == (delete_topics, ["run-1", stop_topic("run-1")])


def test_no_driver_starts_beside_a_folder_that_another_user_can_swap(tmp_path, monkeypatch):
    monkeypatch.setattr(start_driver.subprocess, "Popen", lambda *_, **__: pytest.fail("a driver has started"))
    (tmp_path / "worker").mkdir()
    monkeypatch.setattr(outbox.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    worker = SimpleNamespace(local_directory=str(tmp_path / "worker"))
    assert "can swap the worker's folder" in start_driver._start(None, worker)["error"]  # type: ignore[arg-type]


@pytest.mark.integration
@pytest.mark.slow
def test_the_guard_is_on_another_worker_once_its_own_ends_as_planned(tmp_path):
    status = DriverStatus("tcp://scheduler:8786", "abc")
    (tmp_path / STATUS).write_bytes(encode_status(status.content()))
    given = {"saved_config": {}, "overrides": (), "project": None, "hydra_files": {}, "client": None, "logged": None}
    config = {"dispatch": {"lost_timeout_s": 15}}
    spec = DriverSpec("driver-1", str(tmp_path), config, cwd="", sweep="", **given)  # type: ignore[arg-type]
    with local_client(2) as client:
        guard = submit_guard(client, spec)

        def places() -> list[str]:
            return [worker for worker, keys in client.processing().items() if guard.key in keys]

        (first,) = wait_for(places, "a guard")
        client.retire_workers([first])
        wait_for(lambda: places() not in ([], [first]), "a guard on the other worker")
        status.now.state = "done"
        (tmp_path / STATUS).write_bytes(encode_status(status.content()))
        assert guard.result(timeout=60) is None
