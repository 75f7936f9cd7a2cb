from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ddp_hydra.rank import (
    device_leases,
    environment,
    fork_client,
    inbox,
    launcher,
    network,
    outbox,
    preemption,
    record_relay,
    task,
)
from ddp_hydra.rank.spec import LaunchSpec, RankSpec
from ddp_hydra.record import End, Record

SPEC = RankSpec(0, 2, 0, 2, 0, worker="tcp://127.0.0.1:1", host="127.0.0.1")


def descriptors() -> set[tuple[str, str]]:
    """Those of this process that a rank task could have opened."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith(("pipe:", "socket:", "/memfd:ddp_hydra")):
            found.add((fd, target))
    return found


@pytest.fixture
def worker(tmp_path, monkeypatch) -> SimpleNamespace:
    """As much of a Dask worker as a rank task touches, without a fork server."""
    said: list[Record] = []
    made = SimpleNamespace(
        address=SPEC.worker,
        local_directory=str(tmp_path),
        nanny=None,
        get_current_task=lambda: "task",
        state=SimpleNamespace(tasks={}),
        log_event=lambda topic, message: said.extend(map(Record.decode, message.split(b"\n"))),
        said=said,
    )
    monkeypatch.setattr(task, "get_worker", lambda: made)
    monkeypatch.setattr(fork_client, "hold", lambda: None)
    monkeypatch.setattr(preemption, "prepare", lambda worker: None)
    return made


def fail(*_: object, **__: object) -> None:
    raise OSError(24, "Too many open files")


BREAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the page": lambda patch: patch.setattr(task.SharedStatus, "create", fail),
    "the pipe": lambda patch: patch.setattr(launcher.os, "pipe", fail),
    "the rendezvous": lambda patch: patch.setattr(network, "bind", fail),
    "the fork server": lambda patch: patch.setattr(fork_client, "connect", fail),
    "the environment": lambda patch: (
        patch.setattr(fork_client, "connect", lambda: ExitStack()),
        patch.setattr(environment, "of_rank", fail),
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("what", BREAKS)
def test_a_rank_that_cannot_be_started_says_why_and_leaves_no_descriptor_behind(what, worker, monkeypatch):
    BREAKS[what](monkeypatch)
    before = descriptors()
    task.run_rank(LaunchSpec("gang", 0, SPEC, b""))
    assert descriptors() == before
    end = worker.said[-1]
    assert (end.kind, end.data.failure.kind) == ("end", "start")
    assert end.data.failure.message.startswith("could not be started: OSError: [Errno 24]")
    assert not inbox._boxes
    inbox._ended.clear()


@pytest.fixture
def full_disk(monkeypatch, tmp_path) -> list[float]:
    """The worker's folder has no room; time passes only while room is waited for, and is listed."""
    waited: list[float] = []

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outbox, "folder", refuse)
    monkeypatch.setattr(launcher.retry.time, "monotonic", lambda: 1000.0 + sum(waited))
    monkeypatch.setattr(launcher.time, "sleep", waited.append)
    return waited


def test_a_full_temporary_folder_is_waited_for_and_named(worker, full_disk, tmp_path):
    worker.state.tasks["task"] = SimpleNamespace(state="executing")
    task.run_rank(LaunchSpec("gang", 0, SPEC, b"", retry_s=3.0))
    assert sum(full_disk) == pytest.approx(3.0)
    (warning,) = (record.data.text for record in worker.said if record.kind == "notice")
    assert f"the worker's temporary folder {tmp_path} on host " in warning
    assert " is full (" in warning
    assert "MiB free): trying again for up to 3 s" in warning
    assert [record.data.phase for record in worker.said if record.kind == "beat"] == ["join"] * len(full_disk)
    failure = worker.said[-1].data.failure
    assert (failure.kind, failure.mistake) == ("start", True)  # and not tried again
    assert f"could not be started: the worker's temporary folder {tmp_path} on host " in failure.message
    assert "results.retry_s=3" in failure.message
    inbox._ended.clear()


def test_a_rank_that_waits_for_room_can_be_stopped_and_loses_no_message(worker, full_disk, monkeypatch):
    def send(seconds: float) -> None:
        full_disk.append(seconds)
        inbox.deliver("gang", {worker.address: (0, {"stop": True} if len(full_disk) == 3 else {"n": 1})}, worker)

    worker.state.tasks["task"] = SimpleNamespace(state="executing")
    monkeypatch.setattr(launcher.time, "sleep", send)
    task.run_rank(LaunchSpec("gang", 0, SPEC, b""))
    assert len(full_disk) == 3
    assert worker.said[-1].data.stopped
    inbox._ended.clear()


def test_a_task_that_came_to_another_worker_says_that_its_own_is_lost(worker):
    worker.address = "tcp://127.0.0.1:2"
    task.run_rank(LaunchSpec("gang", 0, SPEC, b""))
    assert [(record.kind, record.data.failure.kind) for record in worker.said] == [("end", "lost")]


def test_the_launch_file_of_a_rank_has_no_name_that_somebody_could_put_another_under(worker, tmp_path):
    with ExitStack() as stack:
        one = task.RankTask(worker, LaunchSpec("gang", 0, SPEC, b"the call"), stack)
        with one.launcher.write_launch_file(device_leases.Share(None, 0, 0)) as launch_file:
            launch_file.seek(0)
            header, _, call = launch_file.read().partition(b"\n")
            assert os.fstat(launch_file.fileno()).st_nlink == 0
    inbox.remove("gang", 0)
    inbox._ended.clear()
    assert (json.loads(header)["spec"]["world_size"], call) == (2, b"the call")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("can_enter", [True, False])
def test_a_rank_works_in_the_folder_of_the_client_where_it_can_be_entered(can_enter, worker, tmp_path, monkeypatch):
    folder = tmp_path / "of the client"
    folder.mkdir()
    if not can_enter:
        monkeypatch.setattr(launcher.os, "access", lambda path, mode: False)
    with ExitStack() as stack:
        one = task.RankTask(worker, LaunchSpec("gang", 0, SPEC, b"", cwd=str(folder)), stack)
        request = one.launcher.request(device_leases.Share(None, 0, 0))
    inbox.remove("gang", 0)
    inbox._ended.clear()
    assert request["cwd"] == str(folder if can_enter else tmp_path)


def test_a_rank_has_its_share_of_the_cores_of_a_host_on_which_other_gangs_run(worker, monkeypatch):
    monkeypatch.setattr(environment, "cores", lambda: list(range(12)))
    spec = replace(SPEC, local_world_size=2)
    threads = []
    for job in ("alone", "beside"):
        with ExitStack() as stack:
            if job == "beside":
                stack.enter_context(device_leases.acquire("other", 4, range(12), [], 0))
            stack.enter_context(device_leases.acquire("mine", 2, range(12), [], 0))  # of the attempt before
            one = task.RankTask(worker, LaunchSpec("mine-1", 1, spec, b"", owner="mine"), stack)
            with one.launcher.write_launch_file(one.launcher.share()) as launch_file:
                launch_file.seek(0)
                threads.append(json.loads(launch_file.readline())["threads"])
        inbox.remove("mine-1", 0)
    inbox._ended.clear()
    assert threads == [6, 2]


@pytest.mark.skipif(os.getuid() != 0, reason="gives folders away, which only root can")
def test_a_folder_that_others_can_swap_is_a_mistake_and_not_tried_again(worker, tmp_path):
    os.chown(tmp_path, 65534, 65534)
    task.run_rank(LaunchSpec("gang", 0, SPEC, b""))
    inbox._ended.clear()
    failure = worker.said[-1].data.failure
    assert failure.mistake
    assert "can swap the worker's folder" in failure.message


def test_a_rank_task_knows_where_its_rank_was_also_when_it_was_told_to_stop(worker):
    with ExitStack() as stack:
        one = task.RankTask(worker, LaunchSpec("gang", 0, SPEC, b""), stack)
        one.shared_status.enter("save", 20)
        one.exit, one.stopping_since = {"exit": -15, "peak_rss": 0}, 1.0
        assert one.end() == End(stopped=True, step=20, phase="save")
        one.stopping_since = None
        end = one.end()
    assert (end.failure.kind, end.failure.message, end.step, end.phase) == ("killed", "killed by SIGTERM", 20, "save")
    inbox.remove("gang", 0)
    inbox._ended.clear()


def test_a_rank_that_is_writing_a_checkpoint_is_stopped_when_it_is_complete_or_at_once(worker, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(task.time, "monotonic", lambda: now)
    signals: list[int] = []
    with ExitStack() as stack:
        one = task.RankTask(worker, LaunchSpec("gang", 0, SPEC, b""), stack)
        worker.state.tasks["task"] = SimpleNamespace(state="executing")
        one.signal = lambda number, alone=False: signals.append(number)
        one.shared_status.saving = True
        one.stop(finish_checkpoint=True)
        one.check_stop()
        assert (one.shared_status.die, signals, one.pause_s) == (False, [], task.TICK_S)
        one.shared_status.saving = False
        one.check_stop()
        assert (one.shared_status.die, signals) == (True, [signal.SIGTERM])

        for end_it in (one.stop, lambda: None):  # somebody has lost patience, or it takes too long
            one.stopping_since = one.save_until = None
            signals.clear()
            one.shared_status.saving = True
            one.stop(finish_checkpoint=True)
            end_it()
            now += task.SAVE_S + 1
            one.check_stop()
            assert signals[0] == signal.SIGTERM
    inbox.remove("gang", 0)
    inbox._ended.clear()


def test_the_output_of_a_rank_that_has_ended_is_listened_to_for_a_moment_and_longer_where_the_client_is_slow(
    worker, monkeypatch
):
    now = 1000.0
    monkeypatch.setattr(task.time, "monotonic", lambda: now)
    with ExitStack() as stack:
        one = task.RankTask(worker, LaunchSpec("gang", 0, SPEC, b""), stack)
        assert not one.is_drained(is_quiet=False)
        now += task.DRAIN_S + 0.1
        assert one.is_drained(is_quiet=True)
        assert not one.is_drained(is_quiet=False)  # there is still something
        one.relay.unacknowledged = record_relay.WINDOW_BYTES
        assert not one.is_drained(is_quiet=True)
        now += 100.0
        assert not one.is_drained(is_quiet=True)
        one.relay.unacknowledged = 0
        now += 20 * task.DRAIN_S
        assert one.is_drained(is_quiet=False)
    inbox.remove("gang", 0)
    inbox._ended.clear()


@pytest.mark.parametrize(
    ("message", "page"),
    [({"finish": 1}, (1, False)), ({"preempted": True}, (3, False)), ({"stop": True}, (0, True))],
)
def test_what_the_client_asks_of_a_rank_is_on_its_page(message, page, worker):
    with ExitStack() as stack:
        one = task.RankTask(worker, LaunchSpec("gang", 0, SPEC, b""), stack)
        one.exit = {"exit": 0}  # it hears no signal any more
        one.box.put(message)
        one.on_inbox()
        assert (one.shared_status.finish, one.shared_status.die) == page
    inbox.remove("gang", 0)
    inbox._ended.clear()
    assert [record.kind for record in worker.said] == ["preempted"] * ("preempted" in message)


def test_a_fork_server_that_dies_with_an_unread_request_takes_the_rank_with_it(worker):
    with ExitStack() as stack:
        one = task.RankTask(worker, LaunchSpec("gang", 0, SPEC, b""), stack)
        one.server, server = (stack.enter_context(end) for end in socket.socketpair())
        one.selector.register(one.server, selectors.EVENT_READ)
        one.server.sendall(b"a request")
        server.close()
        one.on_server()
        assert one.exit == {"exit": -signal.SIGKILL, "peak_rss": 0}
    inbox.remove("gang", 0)
    inbox._ended.clear()


def test_a_rank_that_waits_for_the_client_is_not_stuck(worker, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(task.time, "monotonic", lambda: now)
    with ExitStack() as stack:
        one = task.RankTask(worker, LaunchSpec("gang", 0, SPEC, b""), stack)
        for waiting in (0, record_relay.WINDOW_BYTES, 0):
            now += 10.0
            one.relay.unacknowledged = waiting
            one.beat()
            now += 10.0
            one.beat()
    inbox.remove("gang", 0)
    inbox._ended.clear()
    ages = [record.data.age_s for record in worker.said if record.kind == "beat"]
    assert ages == [0.0, 10.0, 0.0, 0.0, 10.0, 20.0]
    assert all(record.data.first for record in worker.said)


def test_a_rank_task_looks_up_seldom_while_its_rank_trains_and_often_otherwise(worker):
    with ExitStack() as stack:
        one = task.RankTask(worker, LaunchSpec("gang", 0, SPEC, b""), stack)
        assert one.pause_s == task.TICK_S  # it starts
        one.ready = True
        assert one.pause_s == task.CALM_S
        one.relay.buffer.append(b"a record")
        assert one.pause_s == task.FLUSH_S
        one.relay.buffer.clear()
        for until in (5.0, math.inf):  # while stacks are printed, and when that is over
            one.stack_until = until
            assert one.pause_s == (task.CALM_S if until == math.inf else task.TICK_S)
        one.stopping_since = 1.0
        assert one.pause_s == task.TICK_S
    inbox.remove("gang", 0)
    inbox._ended.clear()
