"""Reads stores in processes that were forked from one that has read from the network, as a DataLoader's workers are.

The client of object stores has threads, which a fork does not copy: in a forked process it would hang. So such a
process starts another program, this module, which reads for it and sends what it read through a socket.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

from ddp_hydra.storage import Access, LocalFolder, Store
from ddp_hydra.storage.object_store import is_forked

READS = ("folders", "get", "get_range", "size")
"""Methods of a store with one result."""
ITERATES = ("objects", "stream")
"""Methods that yield several."""
_THREADS = 32


class ForkSafeAccess(Access):
    """Opens URLs, and can go on reading them in a forked process."""

    @classmethod
    def of(cls, access: Access) -> ForkSafeAccess:
        return cls(**{field.name: getattr(access, field.name) for field in fields(Access)})

    def _store(self, root: str) -> Store:
        store = super()._store(root)
        return store if isinstance(store, LocalFolder) else cast(Store, ForkSafeStore(store))


class ForkSafeStore:
    """Reads a store itself, or in a forked process through a `Reader`. It has the attributes of the store.

    Args:
        store: the store.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        if name == "store":  # while it is unpickled
            raise AttributeError(name)
        if not is_forked() or name not in READS + ITERATES:
            return getattr(self.store, name)
        call = Reader.of_this_process().iterate if name in ITERATES else Reader.of_this_process().call
        return partial(call, self.store, name)

    @property
    def ranges(self) -> bool:
        return self.store.ranges

    @ranges.setter
    def ranges(self, ranges: bool) -> None:
        self.store.ranges = ranges


class Reader:
    """A program that reads stores for this process, and ends with it. Each request has a connection of its own."""

    _mine: Reader | None = None
    _starting = threading.Lock()

    @classmethod
    def of_this_process(cls) -> Reader:
        with cls._starting:
            if cls._mine is None or cls._mine.pid != os.getpid():
                cls._mine = cls()
            return cls._mine

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._requests, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join(filter(None, sys.path))
            self.program = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )

    def call(self, store: Store, method: str, *args: Any) -> Any:
        return next(self.iterate(store, method, *args))

    def iterate(self, store: Store, method: str, *args: Any) -> Iterator[Any]:
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as connection:
            try:
                with theirs:
                    socket.send_fds(self._requests, [b"."], [theirs.fileno()])
                connection.send((store, method, args))
                while (answer := connection.recv()) is not None:
                    value, error = answer
                    if error is not None:
                        raise error
                    if isinstance(value, bytes):
                        store.traffic.read(len(value))
                    yield value
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise ConnectionError(
                    "the process that reads the store for this one has ended (killed, or out of memory)"
                ) from None


def serve(requests: socket.socket) -> None:
    stores: dict[Any, Store] = {}

    def answer(connection: Connection) -> None:
        with connection:
            try:
                store, method, args = connection.recv()
                known = stores.setdefault((type(store).__name__, store.url, repr(sorted(_settings(store)))), store)
                found = getattr(known, method)(*args)
                for value in found if method in ITERATES else [found]:
                    connection.send((value if isinstance(value, (int, list, tuple)) else bytes(value), None))
                connection.send(None)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return  # the other end is gone
            except Exception as error:
                connection.send((None, error))

    with ThreadPoolExecutor(_THREADS) as pool:
        while fds := socket.recv_fds(requests, 1, 1)[1]:
            pool.submit(answer, Connection(fds[0]))
        pool.shutdown(cancel_futures=True)


def _settings(store: Any) -> list[str]:
    return [f"{name}={value}" for name, value in vars(store).items() if isinstance(value, (str, int, float, bool))]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; this one ends with its process
    serve(socket.socket(fileno=int(sys.argv[1])))
