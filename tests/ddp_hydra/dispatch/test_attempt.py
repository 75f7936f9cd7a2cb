"""One attempt, with ranks and workers that only say what the tests want."""

from __future__ import annotations

import json
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ddp_hydra import dispatch
from ddp_hydra.dispatch import attempt as module
from ddp_hydra.dispatch import placement, workers
from ddp_hydra.dispatch.attempt import Attempt
from ddp_hydra.dispatch.health import Restarts
from ddp_hydra.dispatch.workers import WorkerSilent
from ddp_hydra.errors import ClusterError, ConfigError, Failure, RankFailed, RecordError
from ddp_hydra.record import Beat, End, File, Log, Notice, Preempted, Record, Stack, Up
from tests.ddp_hydra.dispatch.attempts import OK, Client, Gang, attempt_of, change, end


@pytest.fixture
def make(monkeypatch):
    """An attempt of two ranks, whose ranks stop when they are told to."""
    monkeypatch.setattr(module, "END_S", 0.2)
    monkeypatch.setattr(module, "SETTLE_S", 0.01)
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    threads = set(threading.enumerate())

    def make(*script: Record | dict[str, Any], ranks: int = 2, polite: bool = True) -> Attempt:
        client = Client(ranks)
        client.script = [*(Record(Up(), rank) for rank in range(ranks)), *script]
        if polite:
            client.on_sent = lambda rank, message: client.publish(end(rank, "stopped")) if "stop" in message else None
        specs = placement.plan(dict.fromkeys(client.workers, "h"))
        return attempt_of(Gang(client), 3, specs)

    yield make
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name == "ddp_hydra-record-queue"]


def is_cleared_up(one: Attempt) -> bool:
    return not one.client.topics and not one.futures and len(one.client.cancelled) == len(one.specs)


def test_an_attempt_ends_when_all_ranks_have_and_leaves_nothing_behind(make):
    one = make(Record(Log("x"), 1), end(1), end(0))
    assert one.run(b"") == ["done", "done"]
    assert [record.data for record in one.gang.records] == [Log("x")]
    assert is_cleared_up(one)
    assert one.client.sent == []


def test_a_warning_is_acknowledged_too_or_its_rank_would_not_be_read_for_ever(make, monkeypatch, caplog):
    monkeypatch.setattr(module, "ACKNOWLEDGE_BYTES", 10)
    warning = Record(Notice("a slow disk"), 1)
    one = make(warning, end(1), end(0))
    assert one.run(b"") == ["done", "done"]
    assert one.client.sent == [("topic", 1, {"acknowledged": len(warning.encode())})]
    assert caplog.messages == ["rank 1: a slow disk"]


def test_a_failure_stops_the_others_and_names_its_attempt(make):
    one = make(end(1, "raised", message="ValueError: bad", step=20))
    with pytest.raises(RankFailed, match=r"rank 1 on h: ValueError: bad \(in step 20\)") as caught:
        one.run(b"")
    assert caught.value.failure.attempt == 3
    assert one.client.sent_to("stop") == [0]
    assert is_cleared_up(one)


def test_a_checkpoint_under_way_is_heard_of_when_another_rank_fails(make, monkeypatch, caplog):
    monkeypatch.setattr(module, "END_S", 0.0)

    def finish_saving(rank, message):
        assert message == {"stop": True, "finish_checkpoint": True}
        one.client.publish(Record(File("checkpoints/step-000020.pt", 1, ""), rank))
        one.client.publish(end(rank, "stopped"))

    saving = Beat(21, "backward", saving=True)
    one = make(Record(saving, 0), end(1, "raised", message="ValueError: bad"), polite=False)
    one.client.on_sent = finish_saving
    with pytest.raises(RankFailed, match="rank 1 on h: ValueError: bad"):
        one.run(b"")
    assert [record.kind for record in one.gang.records] == ["file"]
    assert "rank 0 is writing a checkpoint: it gets up to 30 s more for it" in caplog.text
    assert one.client.sent_to("stop") == [0]  # and not again


@pytest.mark.medium
def test_a_client_that_is_busy_with_a_record_says_so_and_takes_nobody_for_stuck_meanwhile(make, caplog):
    stuck = Beat(3, "save", age_s=1000.0)
    one = make(Record(Log("x"), 0))
    change(one, hang_timeout_s=0.1)
    one.health.hang_timeout_s = 0.1
    said = r"busy with one record of rank 0 \(log\) for \d+ s, in on_record"

    def take_time(attempt, record):
        time.sleep(0.05)  # until the attempt takes it for busy
        for rank in range(2):
            one.client.publish(Record(stuck, rank))
        deadline = time.monotonic() + 60
        while not re.search(said, caplog.text) and time.monotonic() < deadline:
            time.sleep(0.01)
        one.gang.records.append(record)

    one.gang.read = take_time
    with pytest.raises(RankFailed, match=r"hangs: no progress for \d{1,2} s in saving a checkpoint"):
        one.run(b"")
    assert len(one.gang.records) == 1
    assert len(re.findall(said, caplog.text)) == 1


def test_a_lost_worker_outranks_the_echo_of_those_who_talked_to_its_rank(make):
    lost = {"action": "remove-worker", "worker": "tcp://h:1"}
    one = make(end(0, "raised", message="RuntimeError: Connection closed by peer"), lost)
    with pytest.raises(RankFailed) as caught:
        one.run(b"")
    assert (caught.value.failure.kind, caught.value.failure.rank) == ("lost", 1)
    assert [failure.rank for failure in caught.value.symptoms] == [0]


def test_a_worker_that_is_retired_was_planned_and_says_so(make, caplog):
    one = make({"action": "remove-worker", "worker": "tcp://h:1", "planned": True}, ranks=2)
    with pytest.raises(RankFailed, match="tcp://h:1 was shut down as planned") as caught:
        one.run(b"")
    gang = dispatch.Gang(None, max_restarts=1)
    gang.attempt, gang.restarts = one, Restarts(1)
    gang.decide_restart(caught.value, lambda done: "")
    assert "a planned end: rank 1 on h: its worker" in caplog.text
    assert gang.restarts.used == 0


RETIRED = {"action": "retire-worker", "worker": "tcp://h:1", "planned": True}


@pytest.mark.parametrize("restarts", [0, 1])
def test_ranks_save_before_a_worker_is_retired_and_go_on_elsewhere_if_they_may(restarts, make):
    one = make(beat(0, "load"), beat(1, "load"), RETIRED)
    change(one, max_restarts=restarts)

    def on_sent(rank: int, message: dict[str, Any]) -> None:
        for record in (Record(Preempted(), 1), end(1), end(0)) if "preempted" in message else ():
            one.client.publish(record)

    one.client.on_sent = on_sent
    if restarts:
        with pytest.raises(RankFailed, match="tcp://h:1 was shut down as planned") as caught:
            one.run(b"")
        assert one.was_planned(caught.value.failure)
    else:
        assert one.run(b"") == ["done", "done"]
    assert (one.client.sent_to("preempted"), one.client.sent_to("stop")) == ([1], [])


def test_ranks_that_have_nothing_to_save_end_at_once_where_a_worker_is_retired(make):
    one = make(RETIRED)
    with pytest.raises(RankFailed, match="tcp://h:1 was shut down as planned"):
        one.run(b"")
    assert one.client.sent_to("preempted") == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_its_worker_has_stopped_is_lost_with_it(ranks, make):
    one = make(end(ranks - 1, "stopped"), ranks=ranks)
    with pytest.raises(RankFailed, match="it was stopped by its worker") as caught:
        one.run(b"")
    assert (caught.value.failure.kind, caught.value.failure.rank) == ("lost", ranks - 1)


# -- the user wants to end ---------------------------------------------------------------------------------


def beat(rank: int, phase: str) -> Record:
    return Record(Beat(phase=phase, step=5, age_s=0.0), rank)


def in_loop(one: Attempt) -> Attempt:
    """The user wants to end when both ranks are known to be in their loop."""
    for rank in range(2):
        one.health.note_heartbeat(rank, beat(rank, "load").data, time.monotonic())
    one.interrupts.wanted = True
    return one


@pytest.mark.medium
@pytest.mark.parametrize("phase", ["join", "run", "start"])
def test_before_the_loop_an_interrupt_ends_an_attempt_at_once(phase, make):
    one = make(beat(0, "load"), beat(1, phase))
    one.interrupts.wanted = True
    with pytest.raises(KeyboardInterrupt):
        one.run(b"")
    assert one.client.sent_to("finish") == []
    assert one.client.sent_to("stop") == [0, 1]
    assert one.gang.gave_up == 1
    assert is_cleared_up(one)


def test_in_the_loop_ranks_are_asked_to_finish_once_and_what_they_return_counts(make):
    one = in_loop(make())
    change(one, grace_s=60.0)
    one.client.on_sent = lambda rank, message: one.client.publish(end(rank)) if "finish" in message else None
    assert one.run(b"") == ["done", "done"]
    assert [message for _, _, message in one.client.sent] == [{"finish": 1}] * 2


def test_a_loop_that_begins_just_as_the_user_interrupts_is_asked_to_finish_too(make, monkeypatch):
    monkeypatch.setattr(module, "LOOP_START_S", 60.0)
    one = make(beat(0, "load"))
    change(one, grace_s=60.0)
    one.interrupts.wanted = True
    one.client.on_sent = lambda rank, message: one.client.publish(end(rank)) if "finish" in message else None
    timer = threading.Timer(0.2, one.client.publish, (beat(1, "load"),))
    timer.start()
    assert one.run(b"") == ["done", "done"]
    timer.join()


def test_ranks_that_do_not_finish_in_time_are_stopped(make):
    one = in_loop(make())
    with pytest.raises(KeyboardInterrupt):
        one.run(b"")
    assert (one.client.sent_to("finish"), one.client.sent_to("stop")) == ([0, 1], [0, 1])


def test_a_preempted_worker_has_all_ranks_finish_and_is_no_interrupt_of_the_user(make):
    one = make(beat(0, "run"), beat(1, "run"), Record(Preempted(), 1))
    stop = one.client.on_sent

    def on_sent(rank: int, message: dict[str, Any]) -> None:
        if "finish" in message and rank == 1:
            one.client.publish({"action": "remove-worker", "worker": "tcp://h:1"})
        stop(rank, message)

    one.client.on_sent = on_sent
    with pytest.raises(RankFailed) as caught:
        one.run(b"")
    assert caught.value.failure.kind == "lost"
    assert [message for _, _, message in one.client.sent if "finish" in message] == [{"finish": 3}] * 2


def test_a_second_interrupt_while_ranks_are_stopped_still_lets_go_of_their_tasks(make):
    def interrupt(rank: int, message: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    one = make(end(1, "raised", message="bad"))
    one.client.on_sent = interrupt
    with pytest.raises(KeyboardInterrupt):
        one.run(b"")
    assert len(one.client.cancelled) == 2
    assert not one.client.topics


def test_an_interrupt_while_tasks_are_submitted_lets_go_of_those_that_are(make, monkeypatch):
    one = make()
    submit = one.client.submit

    def interrupted(*args: Any, key: str, **more: Any) -> Any:
        if key.endswith("-1"):
            raise KeyboardInterrupt
        return submit(*args, key=key, **more)

    monkeypatch.setattr(one.client, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.run(b"")
    assert one.client.cancelled == ["topic-3-rank-0"]
    assert not one.client.topics


# -- ranks are not trusted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [replace(OK, inline="%%%"), replace(OK, inline="AAAA"), replace(OK, size=1)])
def test_a_malformed_value_is_told_in_a_sentence_and_ends_the_attempt(value, make):
    one = make(Record(End(value), 1))
    with pytest.raises((RecordError, OSError)):
        one.run(b"")
    assert is_cleared_up(one)


@pytest.mark.parametrize("line", [b"", b"rubbish", b"[]", Record(Log("x"), 7).encode(), Record(Log("x"), -1).encode()])
def test_what_is_no_record_ends_the_attempt_with_a_sentence(line, make):
    one = make()
    one.client.script.append(line)
    with pytest.raises(RecordError):
        one.run(b"")
    assert is_cleared_up(one)


def test_a_malformed_last_word_does_not_keep_the_tasks(make):
    one = make(end(1, "raised", message="bad"), polite=False)
    one.client.on_sent = lambda rank, message: one.client.publish(b"rubbish")
    with pytest.raises(RecordError):
        one.run(b"")
    assert is_cleared_up(one)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
KEYS = ("failure", "step", "phase", "age_s", "text", "rendezvous", "first", "value", "stopped")


@settings(max_examples=30)
@given(
    st.sampled_from(["beat", "stack", "up", "end"]),
    st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, json_values)),
)
def test_whatever_a_rank_says_ends_in_an_error_of_ours_or_in_none(kind, data):
    client = Client(2)
    one = attempt_of(Gang(client), 0, placement.plan(dict.fromkeys(client.workers, "h")))
    try:
        one.on_record(Record.decode(json.dumps({"data": {**data, "kind": kind}, "rank": 1})), 1)
    except RecordError:
        return
    assert one.health.hang(one.rank_states.running, 1e9) is None or kind == "beat"
    if one.rank_states.failures:
        assert str(one.rank_states.error()).startswith("rank 1 on h: ")


# -- what no record tells ----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["cancelled", "lost"])
def test_tasks_that_are_cancelled_mean_that_the_scheduler_is_lost(status, make, monkeypatch):
    one = make()
    monkeypatch.setattr(one.client, "submit", lambda *_, key, **__: SimpleNamespace(key=key, status=status))
    with pytest.raises(ClusterError, match=r"the scheduler tcp://s:1 is lost, or was restarted; "):
        one.run(b"")
    assert one.client.sent == []


@pytest.mark.parametrize(
    ("comm", "cluster", "said"),
    [
        (object(), None, "the client was closed, so its workers stop the ranks: close it after"),
        (object(), "running", "the client was closed, so its workers stop the ranks: close it after"),
        (object(), "closed", "the scheduler tcp://s:1 is lost"),
        (None, None, "the scheduler tcp://s:1 is lost"),
    ],
)
def test_a_client_that_was_closed_is_told_from_a_lost_scheduler(comm, cluster, said, make, monkeypatch):
    one = make()
    one.client.scheduler_comm, one.client.cluster = comm, cluster and SimpleNamespace(status=Status[cluster])
    monkeypatch.setattr(one.client, "submit", lambda *_, key, **__: SimpleNamespace(key=key, status="cancelled"))
    monkeypatch.setattr(one.client, "status", "closed")
    with pytest.raises(ClusterError, match=said):
        one.run(b"")


def test_a_silent_host_is_lost_and_remembered_for_the_next_attempt(make):
    one = make(beat(0, "load"))
    change(one, lost_timeout_s=0.05)
    with pytest.raises(RankFailed, match="nothing was heard from its worker") as caught:
        one.run(b"")
    assert caught.value.failure.kind == "lost"
    assert "tcp://h:1" in one.silent  # the other was heard a moment later
    assert one.silent <= {"tcp://h:0", "tcp://h:1"}


def test_a_scheduler_that_is_silent_too_is_named_instead(make):
    def fail(n_workers: int) -> None:
        raise TimeoutError

    one = make()
    change(one, lost_timeout_s=0.05)
    one.client.scheduler.identity = fail
    with pytest.raises(ClusterError, match="the scheduler tcp://s:1 was not heard"):
        one.run(b"")
    assert one.silent == set()


def test_a_hang_is_told_with_the_stack_of_the_rank_that_holds_up_the_others(make):
    stuck = [Record(Beat(phase=phase, step=5, age_s=99.0), rank) for rank, phase in ((0, "log"), (1, "load"))]
    one = make(*stuck)

    def answer(rank: int, message: dict[str, Any]) -> None:
        if "stacks" in message:
            one.client.publish(Record(Stack(f"stack of rank {rank}"), rank))
        elif "stop" in message:
            one.client.publish(end(rank, "stopped"))

    one.client.on_sent = answer
    with pytest.raises(RankFailed) as caught:
        one.run(b"")
    failure = caught.value.failure
    assert (failure.kind, failure.rank, failure.step, failure.phase) == ("hung", 1, 5, "load")
    assert failure.traceback == "stack of rank 1"
    assert caught.value.symptoms == ()


def test_a_worker_that_is_gone_before_it_got_its_checkpoint_is_lost_and_the_gang_starts_again(
    make, monkeypatch, tmp_path, caplog
):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("Timed out trying to connect")

    one = make()
    monkeypatch.setattr(workers.WorkerCaller, "call", fail)
    (tmp_path / "a.pt").write_bytes(b"x")
    gang = dispatch.Gang(None, max_restarts=1)
    gang.attempt, gang.restarts = one, Restarts(1)
    with pytest.raises(RankFailed, match="could not be given its files: Timed out") as caught:
        gang.run_attempt(one, dispatch.Call("m:f", files={"resume": tmp_path / "a.pt"}))
    assert (caught.value.failure.kind, one.silent) == ("lost", {"tcp://h:0"})
    gang.decide_restart(caught.value, lambda done: "")
    assert "restart 1 of 1: rank 0 on h: " in caplog.text


@pytest.mark.parametrize("error", [OSError("it does not answer"), OSError(28, "No space left on device")], ids=repr)
def test_a_worker_that_is_gone_with_what_its_rank_returned_is_lost(error, make, monkeypatch):
    def fail(*_: Any) -> None:
        raise error

    one = make(end(0), Record(End(File("value", 9, "", source="v")), 1))
    monkeypatch.setattr(workers, "fetch", fail)
    if error.errno:  # of a file here
        with pytest.raises(OSError, match="No space left"):
            one.run(b"")
    else:
        with pytest.raises(RankFailed, match="could not send what it returned: it does not answer") as caught:
            one.run(b"")
        assert (caught.value.failure.kind, one.silent) == ("lost", {"tcp://h:1"})
    assert is_cleared_up(one)


def test_a_worker_that_does_not_send_a_file_is_lost_and_not_the_job(make, monkeypatch):
    monkeypatch.setattr(module, "CALL_S", 0.0)
    one, skipped = make(), []
    error = RecordError("file 'a' cannot be fetched")
    error.__cause__ = WorkerSilent("worker tcp://h:1 does not answer for 60 s")
    record = Record(File("a", 1, "", source="a"), 1)
    one.records = SimpleNamespace(error=error, failed=record, skip_failed=lambda: skipped.append(record))
    one.check_records()
    assert (skipped, one.silent) == ([record], {"tcp://h:1"})
    assert [(failure.kind, failure.rank) for failure in one.rank_states.failures] == [("lost", 1)]


def test_a_worker_with_another_version_is_a_sentence_and_no_failed_rank(make, monkeypatch):
    one = make()
    failed = SimpleNamespace(status="error", exception=lambda: ConfigError("the client has ddp_hydra 9"))
    monkeypatch.setattr(one.client, "submit", lambda *_, **__: failed)
    monkeypatch.setattr(one.client, "cancel", lambda futures, force: None)
    with pytest.raises(ConfigError, match="the client has ddp_hydra 9"):
        one.run(b"")


def test_a_lost_worker_that_had_said_so_before_was_planned(make):
    one = make()
    one.on_record(Record(Preempted(), 1), 1)
    assert one.health.is_ending, "a suspended rank is waited for no longer than the batch system waits"
    failure = Failure("lost", 1, "h", "its worker left the cluster")
    assert one.was_planned(failure)
    one.events.put(("topic", {"action": "remove-worker", "worker": "tcp://h:1"}))
    one.handle_next(0.0)
    assert "was shut down as planned" in one.rank_states.failures[0].message
    assert not one.was_planned(replace(failure, rank=0))
    assert not one.was_planned(replace(failure, kind="killed"))
