"""Processes that ranks have left behind: ended with their rank, and named once."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from ddp_hydra.rank import processes
from ddp_hydra.rank.processes import LeftBehind


@pytest.fixture
def sent(monkeypatch) -> list[tuple[int, int]]:
    """The signals, each with its process; none is really sent."""
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: signals.append((pid, number)))
    return signals


@pytest.fixture
def host(monkeypatch, sent) -> dict[int, tuple[str, int | None]]:
    """Children by process id: their commands, and their ranks."""
    found: dict[int, tuple[str, int | None]] = {}
    monkeypatch.setattr(processes, "children", lambda: list(found))
    monkeypatch.setattr(processes, "command_of", lambda pid: found[pid][0])
    monkeypatch.setattr(processes, "rank_of", lambda pid: found[pid][1])
    monkeypatch.setattr(processes.os, "getpgid", lambda pid: pid)
    return found


def test_what_a_rank_has_left_behind_is_ended_with_it_and_named_once(host, sent):
    left = LeftBehind()
    host |= {2: ("rank", 2), 3: ("spare", None), 10: ("sleep 10", 1), 20: ("sleep 20", 2)}
    assert left.end(1, {2}, {3}) == ["sleep 10 (process 10)"]
    assert left.end(2, (), {3}) == ["sleep 20 (process 20)"]
    assert sent == [(10, signal.SIGTERM), (20, signal.SIGTERM)]


def test_what_belongs_to_no_known_rank_stays_as_long_as_some_rank_runs(host, sent):
    left = LeftBehind()
    host |= {2: ("rank", 2), 30: ("a daemon", 30)}
    assert left.end(1, {2}) == []
    del host[2]
    assert left.end(2, ()) == ["a daemon (process 30)"]


def test_the_rank_of_a_program_is_in_its_environment_or_leads_its_session():
    for variables, rank in (({processes.RANK_PID: "12"}, 12), ({}, os.getsid(0))):
        # Not a program that sh starts: while one replaces another, the kernel shows no environment.
        command = ["sh", "-c", "echo; read end"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, env={**os.environ, **variables}, **pipes) as program:
            assert program.stdout.readline()
            assert processes.rank_of(program.pid) == rank
            program.kill()
