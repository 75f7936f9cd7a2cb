from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_hydra.rank import (
    device_leases,
    environment,
    fork_client,
    inbox,
    outbox,
    rank_process,
    record_relay,
    task,
)
from ddp_hydra.rank.spec import GangSettings, JobSpec, RankSpec
from ddp_hydra.record import End, Record
from ddp_hydra.storage import retry
from tests.support.clocks import set_time

SPEC = RankSpec(0, 2, 0, 2, 0, worker="tcp://127.0.0.1:1", host="127.0.0.1")


def job(*ranks: RankSpec, gang: str = "gang", attempt: int = 0, **settings: Any) -> JobSpec:
    places = ranks or (SPEC,)
    return JobSpec(gang=gang, attempt=attempt, ranks=places, call=b"the call", settings=GangSettings(**settings))


def descriptors() -> set[tuple[str, str]]:
    """Those of this process that a worker's task could have opened."""
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
    """As much of a Dask worker as a worker's task touches, without a fork server."""
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
    monkeypatch.setattr(inbox, "prepare", lambda worker: None)
    return made


def fail(*_: object, **__: object) -> None:
    raise OSError(24, "Too many open files")


BREAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the page": lambda patch: patch.setattr(rank_process.SharedStatus, "create", fail),
    "the pipe": lambda patch: patch.setattr(rank_process.os, "pipe", fail),
    "the rendezvous": lambda patch: patch.setattr(environment, "bind", fail),
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
    gc.collect()  # what other tests have left closes its own
    for _ in range(3):  # a cluster in this process may open some of its own meanwhile; what leaks does so each time
        before = descriptors()
        task.run_ranks(job().encode())
        inbox._ended.clear()
        if descriptors() <= before:
            break
    else:
        pytest.fail("each try leaves descriptors")
    end = worker.said[-1]
    assert (end.kind, end.data.failure.kind) == ("end", "start")
    assert end.data.failure.message.startswith("could not be started: OSError: [Errno 24]")
    assert not inbox._boxes


def test_a_range_without_a_free_port_is_a_mistake_that_is_not_tried_again(worker, monkeypatch):
    monkeypatch.setattr(environment, "PORT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        task.run_ranks(job(port_range=(port, port), max_restarts=3).encode())
    failure = worker.said[-1].data.failure
    assert f"rank 0 can't listen on 127.0.0.1, port {port}: [Errno 98]" in failure.message
    assert (failure.kind, failure.mistake, failure.traceback) == ("start", True, "")


@pytest.fixture
def full_disk(monkeypatch, tmp_path) -> list[float]:
    """The worker's folder has no room; time passes only while room is waited for, and is listed."""
    waited: list[float] = []

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outbox, "folder", refuse)
    set_time(monkeypatch, retry, monotonic=lambda: 1000.0 + sum(waited))
    set_time(monkeypatch, task, sleep=waited.append)
    return waited


def test_a_full_temporary_folder_is_waited_for_and_named(worker, full_disk, tmp_path):
    worker.state.tasks["task"] = SimpleNamespace(state="executing")
    task.run_ranks(job(retry_s=3.0).encode())
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


def test_a_task_waits_for_room_for_its_own_ranks_alone(worker, full_disk):
    worker.state.tasks["task"] = SimpleNamespace(state="executing")
    elsewhere = replace(SPEC, rank=1, worker="tcp://127.0.0.1:2")
    task.run_ranks(job(SPEC, elsewhere, retry_s=1.0).encode())
    assert {record.rank for record in worker.said} == {0}
    inbox._ended.clear()


def test_a_rank_that_waits_for_room_can_be_stopped_and_loses_no_message(worker, full_disk, monkeypatch):
    def send(seconds: float) -> None:
        full_disk.append(seconds)
        inbox.deliver("gang", 0, None, {"stop": True} if len(full_disk) == 3 else {"n": 1}, worker)

    worker.state.tasks["task"] = SimpleNamespace(state="executing")
    set_time(monkeypatch, task, sleep=send)
    task.run_ranks(job().encode())
    assert len(full_disk) == 3
    assert worker.said[-1].data.stopped
    inbox._ended.clear()


@pytest.fixture
def one(worker) -> Iterator[rank_process.RankProcess]:
    """A rank of a worker's task, whose process was not started."""
    with rank_of(worker) as rank:
        yield rank


@contextmanager
def rank_of(
    worker, number: int = 0, gang: str = "gang", attempt: int = 0, **settings: Any
) -> Iterator[rank_process.RankProcess]:
    spec = replace(SPEC, rank=number)
    one = job(spec, gang=gang, attempt=attempt, **settings)
    with ExitStack() as stack:
        stack.callback(inbox._ended.clear)
        stack.callback(inbox.remove, gang, worker.address, 0)
        served = task.WorkerTask(worker, one, inbox.of_task(gang, worker.address), lambda: False)
        served.selector = stack.enter_context(selectors.DefaultSelector())
        served.ranks[number] = rank = rank_process.RankProcess(served, spec)
        rank.task = served
        stack.callback(rank.stack.close)
        yield rank
        served.sender.flush(at_once=True)


@pytest.mark.parametrize("can_enter", [True, False])
def test_a_rank_works_in_the_folder_of_the_client_where_it_can_be_entered(can_enter, worker, tmp_path, monkeypatch):
    folder = tmp_path / "of the client"
    folder.mkdir()
    if not can_enter:
        monkeypatch.setattr(rank_process.os, "access", lambda path, mode: False)
    with rank_of(worker, cwd=str(folder)) as one:
        one.device = device_leases.Share(None, 0, 0)
        request = one.request()
    assert request["cwd"] == str(folder if can_enter else tmp_path)


def test_a_rank_has_its_share_of_the_cores_of_a_host_on_which_other_gangs_run(worker, monkeypatch):
    monkeypatch.setattr(environment, "cores", lambda: list(range(12)))
    threads = []
    for job in ("alone", "beside"):
        with ExitStack() as stack:
            if job == "beside":
                stack.enter_context(device_leases.acquire("other", 4, range(12), [], 0))
            stack.enter_context(device_leases.acquire("mine", 2, range(12), [], 0))  # of the attempt before
            one = stack.enter_context(rank_of(worker, gang="mine", attempt=1))
            one.device = one.share()
            threads.append(one.launch().job.settings.threads)
    assert threads == [6, 2]


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": " 4,2"}, 4),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}, 2),
        *(({"OMP_NUM_THREADS": odd}, 6) for odd in ("", "0", "-1", "many", "9" * 40)),
    ],
)
def test_a_rank_has_the_threads_that_its_jobs_variables_give(variables, threads, worker, monkeypatch):
    monkeypatch.setattr(environment, "cores", lambda: list(range(12)))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # the worker's
    for settings, wanted in (({}, threads), ({"threads": 3}, 3)):
        with rank_of(worker, variables=variables, **settings) as one:
            one.device = device_leases.Share(None, 0, 0)
            assert one.launch().job.settings.threads == wanted


@pytest.mark.skipif(os.getuid() != 0, reason="gives folders away, which only root can")
def test_a_folder_that_others_can_swap_is_a_mistake_and_not_tried_again(worker, tmp_path):
    os.chown(tmp_path, 65534, 65534)
    task.run_ranks(job().encode())
    inbox._ended.clear()
    failure = worker.said[-1].data.failure
    assert failure.mistake
    assert "can swap the worker's folder" in failure.message


def test_where_a_rank_was_is_known_also_when_it_was_told_to_stop(one):
    one.shared_status.enter("save", 20)
    one.exit, one.stopping_since = {"exit": -15, "peak_rss": 0, "was_ended": True}, 1.0
    assert one.end() == End(stopped=True, step=20, phase="save")
    one.stopping_since = None
    end = one.end()
    assert (end.failure.kind, end.failure.message, end.step, end.phase) == ("killed", "killed by SIGTERM", 20, "save")


def test_a_rank_that_was_killed_before_the_stop_reached_it_says_so(one):
    one.exit, one.stopping_since = {"exit": -9, "peak_rss": 0, "was_ended": False}, 1.0
    assert one.end().failure.message.startswith("killed by SIGKILL")
    one.exit["was_ended"] = True
    assert one.end().stopped


def test_a_rank_that_is_writing_a_checkpoint_is_stopped_when_it_is_complete_or_at_once(one, monkeypatch):
    now = 1000.0
    set_time(monkeypatch, rank_process, monotonic=lambda: now)
    signals: list[int] = []
    one.signal = lambda number, alone=False: signals.append(number)
    one.shared_status.saving = True
    one.stop(finish_checkpoint=True)
    one.check_stop()
    assert (one.shared_status.die, signals, one.pause_s) == (False, [], rank_process.TICK_S)
    one.shared_status.saving = False
    one.check_stop()
    assert (one.shared_status.die, signals) == (True, [signal.SIGTERM])

    for end_it in (one.stop, lambda: None):  # somebody has lost patience, or it takes too long
        one.stopping_since = one.save_until = None
        signals.clear()
        one.shared_status.saving = True
        one.stop(finish_checkpoint=True)
        end_it()
        now += rank_process.SAVE_S + 1
        one.check_stop()
        assert signals[0] == signal.SIGTERM


def test_the_output_of_a_rank_that_has_ended_is_listened_to_for_a_moment_and_longer_where_the_client_is_slow(
    one, monkeypatch
):
    now = 1000.0
    set_time(monkeypatch, rank_process, monotonic=lambda: now)
    assert not one.is_drained(is_quiet=False)
    now += rank_process.DRAIN_S + 0.1
    assert one.is_drained(is_quiet=True)
    assert not one.is_drained(is_quiet=False)  # there is still something
    one.relay.unacknowledged = record_relay.WINDOW_BYTES
    assert not one.is_drained(is_quiet=True)
    now += 100.0
    assert not one.is_drained(is_quiet=True)
    one.relay.unacknowledged = 0
    now += 20 * rank_process.DRAIN_S
    assert one.is_drained(is_quiet=False)


@pytest.mark.parametrize(
    ("message", "page"),
    [
        ({"finish": 1}, (1, False, False)),
        ({"preempted": True}, (3, False, False)),
        ({"stop": True}, (0, True, False)),
        ({"leave": True}, (0, False, True)),
    ],
)
def test_what_the_client_asks_of_a_rank_is_on_its_page(message, page, worker):
    with rank_of(worker) as one:
        one.exit = {"exit": 0}  # it hears no signal any more
        one.task.box.put(message)
        one.task.on_inbox()
        assert (one.shared_status.finish, one.shared_status.die, one.shared_status.leave) == page
    assert [record.kind for record in worker.said] == ["preempted"] * ("preempted" in message)


def test_a_message_reaches_its_rank_alone_or_all_of_the_worker(worker):
    with rank_of(worker) as one:
        other = rank_process.RankProcess(one.task, replace(SPEC, rank=1))
        one.task.ranks[1] = other
        one.relay.unacknowledged = other.relay.unacknowledged = 10
        one.task.box.put({"acknowledged": 4}, 1)
        one.task.box.put({"acknowledged": 1}, 7)  # it has ended
        one.task.box.put({"finish": 2})
        one.task.on_inbox()
        assert (one.relay.unacknowledged, other.relay.unacknowledged) == (10, 6)
        assert one.shared_status.finish == other.shared_status.finish == 2
        other.stack.close()


def test_a_fork_server_that_dies_with_an_unread_request_takes_the_rank_with_it(one):
    one.server, server = (one.stack.enter_context(end) for end in socket.socketpair())
    one.selector.register(one.server, selectors.EVENT_READ)
    one.server.sendall(b"a request")
    server.close()
    one.on_server()
    assert one.exit == {"exit": -signal.SIGKILL, "server": "ended", "was_ended": False}


def test_a_rank_that_waits_for_the_client_is_not_stuck(worker, monkeypatch):
    now = 1000.0
    set_time(monkeypatch, rank_process, monotonic=lambda: now)
    with rank_of(worker) as one:
        for waiting in (0, record_relay.WINDOW_BYTES, 0):
            now += 10.0
            one.relay.unacknowledged = waiting
            one.beat()
            now += 10.0
            one.beat()
    ages = [record.data.age_s for record in worker.said if record.kind == "beat"]
    assert ages == [0.0, 10.0, 0.0, 0.0, 10.0, 20.0]
    assert all(record.data.first for record in worker.said)


def test_after_a_failure_the_task_waits_for_the_next_attempt_and_gets_all_its_messages(worker):
    box = inbox.of_task("mine", worker.address)
    second = job(gang="mine", attempt=2, max_restarts=1)
    inbox.deliver("mine", 1, None, {"stop": True}, worker)  # too late
    for message in ({"job": second.encode()}, {"rendezvous": ["h", 1]}):
        assert inbox.deliver("mine", 2, None, message, worker)
    assert task.next_attempt(box, 1, lambda: False) == second
    assert box.take(2) == [(None, {"rendezvous": ["h", 1]})]
    inbox.remove("mine", worker.address, 0)
    inbox._ended.clear()


@pytest.mark.parametrize("end", ["closed", "cancelled"])
def test_a_task_that_waits_ends_with_its_worker_or_its_client(worker, end):
    box = inbox.of_task("mine", worker.address)
    if end == "closed":
        inbox.send_to_worker(worker.address, {"preempted": True})
    assert task.next_attempt(box, 1, lambda: end == "cancelled") is None
    inbox.remove("mine", worker.address, 0)
    inbox._ended.clear()
