"""What the processes of torchrun say to each other, over real connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from ddp_hydra.dispatch.torchrun_server import Server, addresses
from ddp_hydra.errors import ClusterError
from ddp_hydra.rank import inbox, outbox
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.rank.torchrun_channel import GANG, Channel, Outcome, connect
from ddp_hydra.rank.torchrun_task import TorchrunWorker
from ddp_hydra.record import Log, Record

FIRST, SECOND = (RankSpec(rank, 2, rank, 2, 0, f"rank {rank}", "h") for rank in range(2))


class Heard:
    """What a server has heard."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.hosts: dict[int, str] = {}
        self.lost: list[int] = []

    def wait(self, what: str) -> Any:
        deadline = time.monotonic() + 5
        while not getattr(self, what):
            assert time.monotonic() < deadline, what
            time.sleep(0.005)
        return getattr(self, what)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def server(heard) -> Iterator[Server]:
    with closing(Server(FIRST, heard.lines.append, heard.hosts.__setitem__, heard.lost.append)) as server:
        server.thread.start()
        yield server


@contextmanager
def joined(server: Server, worker: TorchrunWorker) -> Iterator[Channel]:
    box = inbox.Inbox()
    channel = Channel(connect(server.describe(), SECOND, 15.0), 1, worker, box)
    try:
        yield channel
    finally:
        channel.close()
        box.close()


@pytest.fixture
def worker(tmp_path) -> TorchrunWorker:
    folder = tmp_path / "worker"
    folder.mkdir(mode=0o700)
    return TorchrunWorker("rank 1", str(folder))


def line(rank: int = 1, text: str = "b") -> bytes:
    return Record(Log(text), rank).encode()


def test_records_that_wait_for_the_connection_and_later_ones_arrive_in_order(server, heard, worker):
    lines = [line(text=str(number)) for number in range(3)]
    worker.log_event(GANG, lines[0])
    assert worker.unsent == lines[:1]
    with joined(server, worker) as channel:
        worker.send_by(channel.send)
        worker.log_event(GANG, lines[1] + b"\n" + lines[2])
        deadline = time.monotonic() + 5
        while b"\n".join(heard.lines) != b"\n".join(lines) and time.monotonic() < deadline:
            time.sleep(0.005)
    assert b"\n".join(heard.lines) == b"\n".join(lines)
    assert worker.unsent == []
    assert heard.hosts == {1: "h"}
    assert heard.wait("lost") == [1]


def test_messages_and_the_end_of_the_job_arrive(server, heard, worker):
    with joined(server, worker) as channel:
        heard.wait("hosts")
        server.send(1, {"message": {"finish": 1}})
        outcome = Outcome("failed", 0, "why", 1.5)
        for rank in server.peers:
            server.send(rank, {"bye": {"status": "failed", "rank": 0, "message": "why", "time_s": 1.5}})
        assert channel.over.wait(60)
        assert channel.outcome == outcome
        assert channel.box.take(0)[0] == (1, {"finish": 1})


def test_a_file_of_another_host_comes_in_pieces_and_is_removed(server, heard, worker):
    file = outbox.folder(worker, GANG, 1) / "7"
    file.write_bytes(bytes(range(256)) * 1000)
    with joined(server, worker):
        heard.wait("hosts")
        assert server.call(1, "read", lambda: False, name="7", offset=1000) == file.read_bytes()[1000:]
        assert server.call(1, "remove", lambda: False, name="7") == b""
        assert not file.exists()


def test_who_does_not_know_the_token_is_not_heard(server, heard):
    stranger = server.describe() | {"token": "x" * 32}
    with pytest.raises(
        ClusterError, match=r"rank 1 on h does not reach the process of rank 0 at port \d+ \(127\.0\.0\.1: "
    ):
        connect(stranger, SECOND, 15.0)
    for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1}\n', b"x" * 10_000, b"[]\n"):
        with socket.create_connection(server.listener.getsockname()) as connection:
            connection.sendall(said)
            connection.settimeout(5)
            with suppress(ConnectionResetError):
                assert connection.recv(10) == b""
    assert not heard.hosts
    assert not heard.lines


@pytest.mark.parametrize("said", [line(rank=0), b"[1]", b'{"kind": "bomb"}', b"\x80\x04."])
def test_a_rank_that_says_what_no_rank_says_is_cut_off(server, heard, worker, said):
    with joined(server, worker) as channel:
        heard.wait("hosts")
        channel.send(said)
        assert heard.wait("lost") == [1]
        assert channel.over.wait(60)
        assert channel.outcome is None
    assert not heard.lines


def test_a_rank_comes_once(server, heard, worker):
    with joined(server, worker):
        heard.wait("hosts")
        with pytest.raises(ClusterError):
            connect(server.describe(), SECOND, 15.0)


def test_the_server_of_one_host_listens_on_loopback_only(server, heard):
    assert server.listener.getsockname()[0] == "127.0.0.1"
    assert server.describe()["addresses"] == ["127.0.0.1"]
    assert not {"127.0.0.1", "::1"} & set(addresses())
