"""Receives, in the process that torchrun has started as rank 0, what the processes of the other ranks send.

See `rank/torchrun_channel.py` for what is said.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import itertools
import json
import logging
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from ddp_hydra.errors import RecordError
from ddp_hydra.rank import network
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.rank.torchrun_channel import Outcome
from ddp_hydra.record import Record

log = logging.getLogger(__name__)
CALL_S = 15.0
"""Seconds that a process may take to answer."""
SEND_S = 5.0
"""Seconds that a message may take to leave."""
BYE_S = 5.0
"""Seconds that the other processes may take to hang up after the goodbye."""
HELLO_BYTES = 4096
LINE_BYTES = 32 * 2**20
"""Longest line: a piece of a file."""


@dataclass
class Peer:
    """The connection of one process.

    Args:
        connection: to it.
        rank: its rank; None until it has said it with the token.
        received: the beginning of a line.
    """

    connection: socket.socket
    rank: int | None = None
    received: bytearray = field(default_factory=bytearray)


class _Hello(msgspec.Struct):
    """The first line of a process."""

    rank: int
    token: str
    host: str


class _Reply(msgspec.Struct):
    """The answer to a call."""

    reply: int
    data: str | None


class Server:
    """Hears the processes of all other ranks, on a thread of its own.

    Args:
        spec: the place of rank 0.
        on_records: called with the lines of a rank, on that thread.
        on_join: called with a rank and the name of its host.
        on_lost: called with a rank whose connection has ended.
    """

    def __init__(
        self,
        spec: RankSpec,
        on_records: Callable[[bytes], None],
        on_join: Callable[[int, str], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self.spec, self.on_records, self.on_join, self.on_lost = spec, on_records, on_join, on_lost
        self.token = secrets.token_hex(16)
        _allow_files(spec.world_size + 256)
        is_one_host = spec.nodes == 1
        self.listener = _listen("127.0.0.1" if is_one_host else "")
        self.addresses = ["127.0.0.1"] if is_one_host else addresses()
        self.peers: dict[int, Peer] = {}
        self.replies: dict[int, Future[str | None]] = {}
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()
        self.selector = selectors.DefaultSelector()
        self.wake_r, self.wake_w = socket.socketpair()
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self.wake_r, selectors.EVENT_READ, None)
        self.thread = threading.Thread(target=self._serve, name="ddp_hydra-torchrun-server", daemon=True)

    def describe(self) -> dict[str, Any]:
        return {"addresses": self.addresses, "port": self.listener.getsockname()[1], "token": self.token}

    def send(self, rank: int, message: Mapping[str, Any]) -> None:
        """Send a message to a rank's process; one that is gone gets none."""
        with contextlib.suppress(OSError), self.lock:
            if rank in self.peers:
                self.peers[rank].connection.sendall(json.dumps(message).encode() + b"\n")

    def call(self, rank: int, what: str, is_lost: Callable[[], bool], **arguments: Any) -> bytes:
        """Have a rank's process do something with a file, and return its answer.

        Raises:
            OSError: it does not answer.
        """
        number, reply = next(self.numbers), Future[str | None]()
        self.replies[number] = reply
        try:
            self.send(rank, {"call": what, "id": number, **arguments})
            for _ in range(int(CALL_S / 0.1)):
                with contextlib.suppress(TimeoutError):
                    return base64.b64decode(reply.result(0.1) or "")
                if is_lost():
                    break
        finally:
            self.replies.pop(number, None)
        raise OSError(f"the process of rank {rank} {'is lost' if is_lost() else f'does not answer for {CALL_S:g} s'}")

    def say_goodbye(self, outcome: Outcome) -> None:
        for rank in list(self.peers):
            self.send(rank, {"bye": asdict(outcome)})
        until = time.monotonic() + BYE_S
        while self.peers and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        self.wake_w.close()
        if self.thread.ident is not None:
            self.thread.join()
        for end in (self.listener, self.wake_r, *(peer.connection for peer in self.peers.values())):
            end.close()
        self.selector.close()

    # -- on the server's thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.wake_r:
                    return
                key.data() if isinstance(key.fileobj, socket.socket) else None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has given up again
            connection, _ = self.listener.accept()
            connection.settimeout(SEND_S)
            peer = Peer(connection)
            self.selector.register(connection, selectors.EVENT_READ, lambda: self._receive(peer))

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(2**20)
        except OSError:
            data = b""
        begin = len(peer.received)
        peer.received += data
        if not data or len(peer.received) > (LINE_BYTES if peer.rank is not None else HELLO_BYTES):
            self._drop(peer)
            return
        end = peer.received.rfind(b"\n", begin)
        if end < 0:
            return
        lines, peer.received = bytes(peer.received[:end]), peer.received[end + 1 :]
        try:
            if peer.rank is None:
                self._join(peer, msgspec.json.decode(lines, type=_Hello))
            else:
                self._take(peer.rank, lines.split(b"\n"))
        except (ValueError, RecordError) as error:
            log.warning("a connection to rank 0 was closed, because it said what no rank says (%.200r)", error)
            self._drop(peer)

    def _join(self, peer: Peer, hello: _Hello) -> None:
        rank = hello.rank
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            raise ValueError("a wrong token")
        if not 0 < rank < self.spec.world_size or rank in self.peers:
            raise ValueError(f"rank {rank!r:.20}")
        peer.rank = rank
        with self.lock:
            peer.connection.sendall(b"ok\n")
            self.peers[rank] = peer
        self.on_join(rank, hello.host[:255])

    def _take(self, rank: int, lines: list[bytes]) -> None:
        records = []
        for line in lines:
            if line.startswith(b'{"reply"'):
                answer = msgspec.json.decode(line, type=_Reply)
                reply = self.replies.pop(answer.reply, None)
                if reply is not None:
                    reply.set_result(answer.data)
                continue
            if Record.decode(line).rank != rank:
                raise ValueError(f"rank {rank} has sent a record of another rank")
            records.append(line)
        if records:
            self.on_records(b"\n".join(records))

    def _drop(self, peer: Peer) -> None:
        self.selector.unregister(peer.connection)
        with self.lock:
            peer.connection.close()
        if peer.rank is not None:
            self.peers.pop(peer.rank, None)
            self.on_lost(peer.rank)


def addresses() -> list[str]:
    found = [address for addresses in network.interfaces().values() for address in addresses]
    return [address for address in found if address not in ("127.0.0.1", "::1")]


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listen(host: str) -> socket.socket:
    """Listen at a free port; "" for all addresses, IPv6 included."""
    if host or not socket.has_dualstack_ipv6():
        return socket.create_server((host, 0), backlog=1024)
    return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
