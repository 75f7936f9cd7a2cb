from __future__ import annotations

import json
import signal
import subprocess
import sys

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
        raised(0, "RuntimeError: CUDA out of memory"),
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
        ([raised(0, "ValueError: late", 2.0), raised(1, "ValueError: early", 1.0)], [1, 0]),
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
        (0, 0, "exited", "code 0 before its work was done"),
        (3, 0, "exited", "code 3"),
        (-signal.SIGSEGV, 0, "killed", "killed by SIGSEGV"),
        (-signal.SIGABRT, 2**30, "killed", "killed by SIGABRT"),
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


@pytest.mark.integration
def test_a_signal_is_named_as_the_system_reports_it():
    code = subprocess.run([sys.executable, "-c", "import os; os.abort()"], stderr=subprocess.DEVNULL, check=False)
    assert describe_exit(code.returncode) == ("killed", "killed by SIGABRT")


def test_a_failure_that_a_rank_sends_gets_its_rank_and_place():
    sent = Failure("raised", message="ValueError: x", traceback="Traceback", time_s=5.0, last_output="last words")
    assert sent.of_rank(2, "h", 1, 20, "load") == Failure(
        "raised", 2, "h", "ValueError: x", "Traceback", 5.0, 1, "last words", step=20, phase="load"
    )


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


def test_without_a_traceback_the_last_words_are_told():
    said = "".join(f"line {n}\n" for n in range(50))
    told = explain(Failure("killed", 0, "h", "killed by SIGSEGV", last_output=said)).splitlines()
    assert told[:3] == ["rank 0 on h: killed by SIGSEGV", "", "its last output:"]
    assert told[3:] == [f"  line {n}" for n in range(30, 50)]


@pytest.mark.parametrize(
    ("message", "step", "told"),
    [
        ("ValueError: bad", 20, "rank 0 on h: ValueError: bad (in step 20)"),
        ("ValueError: bad", 0, "rank 0 on h: ValueError: bad"),
        ("the loss is nan in step 20; lower the rate", 20, "rank 0 on h: the loss is nan in step 20; lower the rate"),
    ],
)
def test_the_step_is_told_where_there_was_one_and_the_message_does_not_name_it(message, step, told):
    assert explain(Failure("raised", 0, "h", message, step=step)) == told


def test_the_step_of_a_lost_rank_is_where_it_was_last_heard_of():
    told = explain(Failure("lost", 0, "h", "its worker left the cluster", step=2))
    assert told == "rank 0 on h: its worker left the cluster (last heard of in step 2)"


def test_who_says_that_another_rank_was_the_cause_is_a_symptom_however_early():
    mine = Failure(
        "raised", 0, "h", "rank 1 found a loss that is not finite", time_s=1.0, mistake=True, consequence=True
    )
    cause = Failure("raised", 1, "h", "the loss is nan", time_s=2.0, mistake=True)
    assert mine.is_symptom
    assert root_cause([mine, cause]) == (cause, (mine,))
    assert root_cause([mine]) == (mine, ())


def test_a_mistake_of_the_user_is_told_in_its_own_words_only():
    failure = Failure("raised", 0, "h", "no images under s3://b/p", "Traceback …", last_output="noise", mistake=True)
    assert explain(failure) == "rank 0 on h: no images under s3://b/p"


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
    failure = replace(sent, last_output=clear + "words").of_rank(0, "h", 0, 0, "run")
    assert (failure.message, failure.last_output, failure.place) == ("ValueError: bad", "words", "")
    assert len(failure.traceback) < 40_000
    assert explain(failure).startswith("rank 0 on h: ValueError: bad\n\nyyy")
