"""Connects the process that torchrun has started for a rank with the process of rank 0, which writes the results.

Both ends send lines of JSON. To rank 0 go the records of `results`, as they are; everything else is an object with one
of the keys below. Nothing is unpickled.

    from rank 0     {"message": ...}           for the worker's task, as from a client of Dask
                    {"call": "read", "id", "name", "offset"}    a piece of a file in the rank's outbox
                    {"call": "remove", "id", "name"}            the file has arrived
                    {"bye": {...}}             how the job has ended, see `Outcome`
    to rank 0       {"token", "rank", "host"}  the first line
                    {"reply": id, "data"}      base64; null after "remove"
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ddp_hydra.errors import ClusterError
from ddp_hydra.rank import inbox, outbox
from ddp_hydra.rank.spec import RankSpec

GANG = "torchrun"
"""Name of the gang in inbox and outbox."""
CONNECT_S = 5.0
"""Seconds for which each address is tried."""
WELCOME_S = 30.0
"""Seconds that rank 0's process may take to answer: all ranks come at once."""


@dataclass(frozen=True)
class Outcome:
    """Holds how a job has ended, for the processes of all ranks.

    Args:
        status: done, interrupted or failed.
        rank: the rank that caused the failure; None if it was none.
        message: of the failure.
        time_s: of the failure, in seconds since 1970.
    """

    status: str = "failed"
    rank: int | None = None
    message: str = ""
    time_s: float = 0.0

    @property
    def exit_code(self) -> int:
        return {"done": 0, "interrupted": 130}.get(self.status, 1)

    @classmethod
    def of(cls, data: Any) -> Outcome:
        """Read what rank 0 sent; what nobody understands is a failure."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError:
            return cls()


def connect(server: Mapping[str, Any], spec: RankSpec, lost_timeout_s: float) -> socket.socket:
    """Connect to the process of rank 0.

    Args:
        server: addresses, port and token; a host may have addresses that do not lead here from everywhere.
        spec: this rank's place.
        lost_timeout_s: for how long what is sent may stay unanswered.

    Raises:
        ClusterError: no address leads to it.
    """
    reasons = []
    hello = {"token": server["token"], "rank": spec.rank, "host": spec.host}
    for address in server["addresses"]:
        try:
            connection = socket.create_connection((address, server["port"]), CONNECT_S)
            try:
                connection.settimeout(WELCOME_S)
                connection.sendall(json.dumps(hello).encode() + b"\n")
                if connection.recv(3) == b"ok\n":
                    connection.settimeout(None)
                    watch(connection, lost_timeout_s)
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
            reasons.append(f"{address}: not rank 0")
        except OSError as error:
            reasons.append(f"{address}: {error}")
    raise ClusterError(
        f"rank {spec.rank} on {spec.host} does not reach the process of rank 0 at port {server['port']} "
        f"({'; '.join(reasons)}): all ports have to be open between the hosts, see docs/clusters.md"
    )


def watch(connection: socket.socket, lost_timeout_s: float) -> None:
    """Have the kernel end a connection whose other end does not answer, because its host is down or cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        seconds = max(1, round(lost_timeout_s / 3))
        for name, value in (("IDLE", seconds), ("INTVL", seconds), ("CNT", 3)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"), value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_timeout_s * 1000))


class Channel:
    """The end of a connection at a rank other than 0.

    Args:
        connection: to the process of rank 0.
        rank: this rank.
        worker: holds the rank's outbox; see `torchrun_task.TorchrunWorker`.
        box: for messages to the worker's task.

    Attributes:
        outcome: how the job has ended; None while that is not known.
        over: the connection has ended, or the outcome is known.
    """

    def __init__(self, connection: socket.socket, rank: int, worker: Any, box: inbox.Inbox) -> None:
        self.connection, self.rank, self.worker, self.box = connection, rank, worker, box
        self.outcome: Outcome | None = None
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._read, name="ddp_hydra-torchrun", daemon=True)
        self.thread.start()

    def send(self, line: bytes) -> None:
        """Send lines; those that rank 0's process does not get are lost with it."""
        with contextlib.suppress(OSError), self.lock:
            self.connection.sendall(line + b"\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.connection.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError), self.connection.makefile("rb") as lines:
            for line in lines:
                self._act(json.loads(line))
        self.over.set()
        self.box.put({"stop": True})  # a rank that still runs has lost its gang

    def _act(self, order: dict[str, Any]) -> None:
        if "message" in order:
            self.box.put(order["message"], self.rank)
        elif "bye" in order:
            self.outcome = Outcome.of(order["bye"])
            self.over.set()
        elif order["call"] == "read":
            piece = outbox.read(GANG, self.rank, order["name"], order["offset"], self.worker)
            self._reply(order["id"], base64.b64encode(piece).decode())
        elif order["call"] == "remove":
            outbox.remove(GANG, self.rank, order["name"], self.worker)
            self._reply(order["id"], None)

    def _reply(self, number: int, data: str | None) -> None:
        self.send(json.dumps({"reply": number, "data": data}).encode())
