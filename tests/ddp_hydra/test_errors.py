from __future__ import annotations

import json
import signal

import pytest
from msgspec.structs import replace

from ddp_hydra.errors import Failure, describe_exit, explain, root_cause

GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"


def raised(rank: int, message: str, time_s: float = 0.0, host: str = "h") -> Failure:
    return Failure("raised", rank, host, message, time_s=time_s)


@pytest.mark.parametrize(
    "message",
    [
        GLOO,
        "RuntimeError: [..] Read error [127.0.0.1]:1: Connection reset by peer",
        "DistNetworkError: The client socket has failed to connect: Connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0",
        "DistBackendError: [2] is setting up NCCL communicator: recvValue failed on SocketImpl",
        "DistBackendError: NCCL error: remote process exited or there was a network error",
        "DistBackendError: NCCL error in: x.cpp:1, unhandled system error",
    ],
)
def test_what_a_collective_says_of_a_dead_partner_is_a_symptom(message):
    assert raised(0, message).is_symptom


@pytest.mark.parametrize(
    "failure",
    [
        raised(0, "ValueError: bad label 12"),
        Failure("killed", 0, "h", "killed by SIGPIPE: broken pipe"),
        Failure("lost", 0, "h", "its worker tcp://a:1 left the cluster; connection closed"),
        Failure("exited", 0, "h", "the process exited with code 1"),
    ],
)
def test_a_failure_of_its_own_is_no_symptom(failure):
    assert not failure.is_symptom


@pytest.mark.parametrize(
    ("failures", "order"),
    [
        ([raised(0, "ValueError: x")], [0]),
        ([raised(0, GLOO, 1.0), raised(1, "ValueError: x", 2.0)], [1, 0]),
        ([raised(0, GLOO, 1.0), Failure("killed", 1, "h", "killed by SIGKILL", time_s=9.0)], [1, 0]),
        ([raised(2, "ValueError", 1.0), raised(1, "ValueError", 1.0)], [1, 2]),
        ([raised(2, GLOO, 3.0), raised(1, GLOO, 2.0), raised(0, GLOO, 4.0)], [1, 2, 0]),
        # The clock of another host is 5 s ahead.
        ([raised(1, "ValueError: first", 7.0, "ahead"), raised(0, "ValueError: follows", 3.0)], [1, 0]),
        ([raised(3, "late", 9.0, "a"), raised(2, "ValueError", 1.0), raised(1, "early", 8.0, "a")], [1, 3, 2]),
        ([Failure("lost", 1, "h", "left", time_s=5.0), raised(0, "ValueError", 2.0)], [1, 0]),
    ],
)
def test_the_cause_is_what_came_first_and_never_an_echo(failures, order):
    cause, symptoms = root_cause(failures)
    assert [failure.rank for failure in (cause, *symptoms)] == order


@pytest.mark.parametrize(
    ("code", "peak", "kind", "words"),
    [
        (3, 0, "exited", "code 3"),
        (-signal.SIGABRT, 2**30, "killed", "killed by SIGABRT: by a library, as gloo does where ranks exchange"),
        (-signal.SIGKILL, 0, "killed", "killed by SIGKILL: by hand, or by the system because memory ran out"),
        (-signal.SIGKILL, 3 * 2**30, "killed", "its peak memory was 3,072 MiB"),
        (-99, 0, "killed", "killed by signal 99"),
    ],
)
def test_a_silent_end_is_named(code, peak, kind, words):
    found, message = describe_exit(code, peak)
    assert found == kind
    assert words in message
    if code != -signal.SIGKILL:
        assert "memory" not in message


def test_the_story_has_the_cause_its_traceback_and_the_followers():
    cause = Failure(
        "raised", 1, "node-7", "ValueError: bad", "Traceback:\n  line 3\nValueError: bad\n", last_output="noise"
    )
    told = explain(cause, [raised(0, GLOO + "\nmore"), raised(2, "x" * 500)])
    assert told.splitlines() == [
        "rank 1 on node-7: ValueError: bad",
        "",
        "Traceback:",
        "  line 3",
        "ValueError: bad",
        "",
        "the other ranks followed:",
        f"  rank 0: {GLOO}",
        f"  rank 2: {'x' * 160}",
    ]


def test_a_message_of_several_ranks_is_told_once_and_few_messages_are():
    cause = Failure("killed", 3, "h", "killed by SIGKILL")
    texts = dict.fromkeys((0, 1, 2, 4), GLOO) | {rank: f"port {rank}" for rank in range(5, 4096)}
    told = explain(cause, [raised(rank, text) for rank, text in texts.items()])
    lines = told.splitlines()
    assert lines[2:5] == ["the other ranks followed:", f"  rank 0-2, 4: {GLOO}", "  rank 5: port 5"]
    assert lines[-1] == "  rank 24-4095: with other messages"
    assert len(lines) == 24


def test_without_a_traceback_the_last_words_are_told():
    said = "".join(f"line {n}\n" for n in range(50))
    told = explain(Failure("killed", 0, "h", "killed by SIGSEGV", last_output=said)).splitlines()
    assert told[:3] == ["rank 0 on h: killed by SIGSEGV", "", "its last output:"]
    assert told[3:] == [f"  line {n}" for n in range(30, 50)]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (Failure("raised", 0, "h", "ValueError: bad", step=20), "ValueError: bad (in step 20)"),
        (Failure("raised", 0, "h", "ValueError: bad"), "ValueError: bad"),
        (
            Failure("raised", 0, "h", "the loss is nan in step 20; lower it", step=20),
            "the loss is nan in step 20; lower it",
        ),
        (Failure("lost", 0, "h", "its worker left", step=2), "its worker left (last heard of in step 2)"),
        (Failure("raised", 0, "h", "no images", "Traceback …", last_output="noise", mistake=True), "no images"),
    ],
    ids=["step", "none", "named", "lost", "mistake"],
)
def test_a_failure_is_told_with_its_step_where_the_message_does_not_name_it(failure, told):
    assert explain(failure) == f"rank 0 on h: {told}"


def test_who_says_that_another_rank_was_the_cause_is_a_symptom_however_early():
    mine = Failure(
        "raised", 0, "h", "rank 1 found a loss that is not finite", time_s=1.0, mistake=True, consequence=True
    )
    cause = Failure("raised", 1, "h", "the loss is nan", time_s=2.0, mistake=True)
    assert mine.is_symptom
    assert root_cause([mine, cause]) == (cause, (mine,))
    assert root_cause([mine]) == (mine, ())


def test_the_summary_shows_plain_fields():
    more = {"mistake": True, "step": 7, "phase": "load", "place": "models/mine.py, line 3"}
    shown = Failure("raised", 1, "h", "m", "t", 5.0, 2, "said", **more).as_dict()
    assert json.loads(json.dumps(shown)) == {
        "kind": "raised",
        "rank": 1,
        "host": "h",
        "attempt": 2,
        "step": 7,
        "message": "m",
        "place": "models/mine.py, line 3",
        "traceback": "t",
    }


def test_what_a_rank_says_of_its_end_reaches_the_terminal_without_escape_sequences_and_within_bounds():
    red, clear = "\x1b[31m", "\x1b]0;title\x07\x1b[2J\r"
    sent = Failure("raised", message=f"{clear}ValueError: {red}bad", traceback=clear + "y" * 10**6, place=red)
    failure = replace(sent, last_output=clear + "words").of_rank(2, "h", 1, 20, "load")
    assert (failure.rank, failure.host, failure.attempt, failure.step, failure.phase) == (2, "h", 1, 20, "load")
    assert (failure.message, failure.last_output, failure.place) == ("ValueError: bad", "words", "")
    assert len(failure.traceback) < 40_000
    assert explain(failure).startswith("rank 2 on h: ValueError: bad (in step 20)\n\nyyy")
