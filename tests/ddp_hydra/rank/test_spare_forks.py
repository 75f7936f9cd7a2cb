"""Forks that wait for a rank: what they get, what they hold, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ddp_hydra.rank import spare_forks
from ddp_hydra.rank.spare_forks import SpareForks, become_rank

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the server has no threads


def tell(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Instead of a rank: write what it was asked for, and the inodes of what it holds."""
    held = []
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the listing's own
            held.append(os.fstat(number).st_ino)
    os.write(fds[0], json.dumps([os.getpid(), request, len(fds), held]).encode())
    os._exit(7)


@pytest.fixture
def spares(monkeypatch) -> Iterator[SpareForks]:
    monkeypatch.setattr(spare_forks, "SEND_S", 60.0)
    made = SpareForks(lambda: made.close(), tell)
    yield made
    made.end()


@pytest.fixture
def ask(spares) -> Callable[[Any], tuple[int | None, list[Any]]]:
    """Hand a request to a fork; return its process id, and what it tells."""

    def ask(request: Any) -> tuple[int | None, list[Any]]:
        read, write = os.pipe()
        try:
            pid = spares.take(request, [write, write])
        finally:
            os.close(write)
        with os.fdopen(read) as file:
            told = file.read()
        if pid is not None:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        return pid, json.loads(told or "[]")

    return ask


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.medium
def test_a_fork_gets_the_request_and_the_descriptors(spares, ask):
    spares.add()
    (fork,) = spares.connections
    request = {"title": "x", "environment": {"A": "ä" * 300_000}}  # more than a socket holds
    pid, told = ask(request)
    assert pid == fork
    assert told[:3] == [fork, request, 2]
    assert not spares.connections
    assert ask(request) == (None, [])


@pytest.mark.medium
def test_it_holds_nothing_of_the_others(spares, ask):
    """Else the end of the server would not be the end of them."""
    for _ in range(3):
        spares.add()
    last = list(spares.connections)[-1]
    others = {os.fstat(one.fileno()).st_ino for pid, one in spares.connections.items() if pid != last}
    pid, told = ask({})
    assert pid == last
    assert len(others) == 2
    assert others.isdisjoint(told[3])


@pytest.mark.medium
def test_they_end_with_the_server(spares):
    for _ in range(2):
        spares.add()
    pids = list(spares.connections)
    assert all(state_of(pid) not in "ZX" for pid in pids)
    spares.close()  # as the kernel does it then
    for pid in pids:
        assert os.waitpid(pid, 0) == (pid, 0)


@pytest.mark.medium
def test_as_many_are_missing_as_are_wanted(spares, monkeypatch):
    assert not spares.are_missing
    spares.wanted = 2
    spares.add()
    assert spares.are_missing
    spares.add()
    assert not spares.are_missing
    monkeypatch.setattr(spare_forks, "MOST", 1)
    spares.wanted = 100
    assert not spares.are_missing


@pytest.mark.medium
def test_one_that_was_killed_gets_nothing(spares, ask):
    for _ in range(2):
        spares.add()
    last = list(spares.connections)[-1]
    os.kill(last, signal.SIGKILL)
    while state_of(last) != "Z":
        time.sleep(0.01)
    pid, _ = ask({})
    assert pid != last
    assert not spares.connections
    assert not Path(f"/proc/{last}").exists()


@pytest.mark.medium
def test_one_that_is_suspended_is_killed(spares, ask, monkeypatch):
    monkeypatch.setattr(spare_forks, "SEND_S", 0.1)
    spares.add()
    (fork,) = spares.connections
    os.kill(fork, signal.SIGSTOP)
    assert ask({"environment": "x" * 2**21}) == (None, [])
    assert not Path(f"/proc/{fork}").exists()


def test_an_end_is_told_apart_from_that_of_a_rank(spares):
    spares.add()
    (fork,) = spares.connections
    os.kill(fork, signal.SIGTERM)
    assert os.waitpid(fork, 0)[0] == fork
    assert spares.forget(fork)
    assert not spares.forget(fork)


def test_a_host_that_allows_no_more_processes_has_none(spares, monkeypatch):
    def refuse() -> int:
        raise BlockingIOError

    spares.wanted = 2
    monkeypatch.setattr(os, "fork", refuse)
    spares.add()
    assert not spares.connections
    assert not spares.are_missing


def test_whoever_closes_the_socket_ends_them(spares):
    spares.add()
    ((fork, connection),) = spares.connections.items()
    connection.shutdown(socket.SHUT_RDWR)
    assert os.waitpid(fork, 0) == (fork, 0)
    assert spares.forget(fork)


@pytest.mark.medium
def test_a_fork_that_cannot_become_a_rank_says_why_in_the_output_of_the_rank(tmp_path):
    read, write = os.pipe()
    request = {"affinity": None, "environment": {}, "cwd": str(tmp_path / "gone"), "path": sys.path}
    pid = os.fork()
    if pid == 0:
        sys.stderr = os.fdopen(2, "w", closefd=False)  # pytest has another
        become_rank(request, [write] * 3)
    os.close(write)
    with os.fdopen(read) as output:
        said = output.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/gone'" in said
