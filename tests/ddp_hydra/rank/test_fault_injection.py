from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ddp_hydra import heartbeat
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.fault_injection import KINDS, PLACES, Fault, FaultInjector
from tests.support.clocks import set_time


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    """No fault strikes the tests that follow."""
    heartbeat.connect(None)
    yield
    fault_injection.install(0, 0, {})
    heartbeat.connect(None)


@pytest.fixture
def killed(monkeypatch) -> list[tuple[int, int]]:
    """Signals that would have been sent, to whom."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    set_time(monkeypatch, fault_injection, sleep=lambda seconds: None)
    return sent


def armed(*texts, rank=1, attempt=0, **pids) -> FaultInjector:
    return FaultInjector(rank, attempt, pids, fault_injection.parse(texts))


# -- what can be written -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill", Fault("kill", 0, 0, "forward", 0, 5.0)),
        ("kill,rank=1,step=20", Fault("kill", rank=1, step=20)),
        (" hang , rank=0 ,at=load,attempt=-1", Fault("hang", at="load", attempt=-1)),
        ("slow,seconds=0.25,at=write", Fault("slow", at="write", seconds=0.25)),
    ],
)
def test_a_fault_is_read_as_it_is_typed(text, fault):
    assert Fault.parse(text) == fault


@pytest.mark.parametrize(
    "text",
    [
        "", "?", "kil", "kill,", "kill,rank", "kill,rank=", "kill,rank=one", "kill,step=1.5", "kill,who=1",
        "kill,rank=-1", "kill,step=-1", "kill,attempt=-2", "kill,at=lunch", "kill,at=join", "kill,at=end",
        "slow,seconds=x", "slow,seconds=-1", "slow,seconds=inf", "kill;rank=1",
    ],
)  # fmt: skip
def test_what_is_no_fault_is_refused_with_what_is_allowed(text):
    with pytest.raises(ConfigError) as caught:
        Fault.parse(text)
    assert all(word in str(caught.value) for word in (repr(text), *KINDS, *PLACES, "rank=<n>"))


# -- when they strike --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strikes"),
    [
        ("kill,rank=1,step=5", True),
        ("kill,rank=0,step=5", False),
        ("kill,rank=1,step=4", False),
        ("kill,rank=1", True),
        ("kill,rank=1,step=5,at=backward", False),
        ("kill,rank=1,step=5,attempt=1", False),
        ("kill,rank=1,step=5,attempt=-1", True),
        ("nan,rank=1,step=5", False),
    ],
)
def test_a_fault_waits_for_its_rank_step_phase_and_attempt(text, strikes):
    assert bool(armed(text).due("forward", 5)) is strikes


def test_a_fault_strikes_once_also_where_its_step_comes_again():
    waiting = armed("kill,rank=1,step=5", "kill,rank=1,step=6")
    assert [len(waiting.due("forward", step)) for step in (4, 5, 5, 6, 6)] == [0, 1, 0, 1, 0]
    anywhere = armed("kill,rank=1,at=save")  # the first time that the place comes
    assert [len(anywhere.due(*where)) for where in (("load", 1), ("save", 7), ("save", 14))] == [0, 1, 0]


def test_a_loss_of_nan_comes_each_time_that_its_step_does():
    waiting = armed("nan,rank=1,step=5", "nan,rank=0,step=6")
    assert [waiting.corrupts(step) for step in (4, 5, 5, 6)] == [False, True, True, False]
    assert not armed("nan,rank=1,step=5,attempt=1").corrupts(5)


# -- what they do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "whom", "number"),
    [
        ("kill", None, signal.SIGKILL),
        ("stop", None, signal.SIGSTOP),
        ("worker", 4711, signal.SIGKILL),
        ("nanny", 4712, signal.SIGKILL),
        ("term", 4712, signal.SIGTERM),
    ],
)
def test_signals_go_to_the_rank_its_worker_or_its_nanny(kind, whom, number, killed, capfd):
    armed(f"{kind},rank=1", worker=4711, nanny=4712)("forward", 1)
    assert killed == [(whom or os.getpid(), number)]
    assert "fault on purpose: Fault(kind=" in capfd.readouterr().out


@pytest.mark.parametrize("pids", [{}, {"nanny": 0}, {"nanny": 1}])
def test_a_worker_without_a_nanny_is_not_struck_and_neither_is_anybody_else(pids, killed, capfd):
    armed("term,rank=1", **pids)("forward", 1)
    assert killed == []
    assert "there is no nanny" in capfd.readouterr().err


def test_other_faults_do_what_they_say(monkeypatch):
    with pytest.raises(RuntimeError, match="a fault on purpose"):
        armed("raise,rank=1")("forward", 1)
    did = []
    monkeypatch.setattr(os, "_exit", did.append)
    set_time(monkeypatch, fault_injection, sleep=did.append)
    monkeypatch.setattr(fault_injection.ctypes, "string_at", did.append)
    for text in ("exit,rank=1", "slow,rank=1,seconds=0.5", "hang,rank=1", "segv,rank=1"):
        armed(text)("forward", 1)
    assert did == [3, 0.5, 1e9, 0]


# -- in a process ------------------------------------------------------------------------------------------


def test_faults_wait_at_the_phases_of_a_process(capfd):
    fault_injection.install(1, 2, {})
    assert fault_injection.activate(["raise,rank=1,step=3,attempt=2", "nan,rank=1,step=1,attempt=2"]).corrupts(1)
    heartbeat.at("forward", 2)
    heartbeat.at("load", 3)
    with pytest.raises(RuntimeError, match="on purpose"):
        heartbeat.at("forward", 3)
    heartbeat.at("forward", 3)
    assert capfd.readouterr().out.count("fault on purpose") == 1


def test_a_checkpoint_has_a_place_of_its_own():
    fault_injection.write(1)
    fault_injection.install(0, 0, {})
    fault_injection.activate(["raise,step=4,at=write"])
    heartbeat.at("save", 4)
    fault_injection.write(3)
    with pytest.raises(RuntimeError, match="on purpose"):
        fault_injection.write(4)
