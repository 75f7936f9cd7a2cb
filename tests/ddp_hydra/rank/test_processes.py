"""Processes that ranks have left behind: ended once, and named once."""

from __future__ import annotations

import signal

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
def host(monkeypatch, sent) -> dict[int, str]:
    """Commands of the children, by process id."""
    commands: dict[int, str] = {}
    monkeypatch.setattr(processes, "children", lambda: list(commands))
    monkeypatch.setattr(processes, "command_of", lambda pid: commands.get(pid, ""))
    monkeypatch.setattr(processes.os, "getpgid", lambda pid: pid)
    return commands


def test_what_came_before_its_rank_was_known_to_have_ended_is_named_with_it(host, sent):
    left = LeftBehind()
    host |= {1: "rank", 2: "rank", 10: "sleep 10"}
    assert left.end(1, True, {2}) == ["sleep 10 (process 10)"]
    del host[1], host[10]
    host[20] = "sleep 20"  # of rank 2, which ends
    assert left.end(10, False, {2}) == []
    assert left.end(2, True, ()) == ["sleep 20 (process 20)"]
    assert sent == [(10, signal.SIGTERM), (20, signal.SIGTERM)]


def test_what_was_found_long_ago_is_no_later_ranks(host, monkeypatch):
    left = LeftBehind()
    host |= {2: "rank", 20: "sleep 20"}
    assert left.end(10, False, {2}) == []
    later = left.until[20] + processes.LEFT_S
    monkeypatch.setattr(processes.time, "monotonic", lambda: later)
    assert left.end(2, True, ()) == []
