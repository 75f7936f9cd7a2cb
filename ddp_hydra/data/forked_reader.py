"""Reads stores in processes that were forked from one that has read from the network, as a DataLoader's workers are.

The client of object stores has threads, which a fork does not copy: in a forked process it would hang. So such a
process starts another program, this module, which reads for it and sends what it read through a socket.
"""

from __future__ import annotations

import itertools
import os
import queue
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
    """A program that reads stores for this process, and ends with it."""

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
        ours, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join(filter(None, sys.path))
            self.program = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        self._connection = Connection(ours.detach())
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}
        self._ended = False
        threading.Thread(target=self._receive, name="forked-reader", daemon=True).start()

    def call(self, store: Store, method: str, *args: Any) -> Any:
        return next(self.iterate(store, method, *args))

    def iterate(self, store: Store, method: str, *args: Any) -> Iterator[Any]:
        number, answers = next(self._numbers), queue.SimpleQueue[Any]()
        self._answers[number] = answers
        try:
            with self._sending:
                self._connection.send((number, store, method, args))
            while not self._ended or not answers.empty():
                kind, value = answers.get()
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                if isinstance(value, bytes):
                    store.traffic.read(len(value))
                yield value
        except (BrokenPipeError, ConnectionResetError):
            raise _gone() from None
        finally:
            del self._answers[number]

    def _receive(self) -> None:
        try:
            while True:
                number, kind, value = self._connection.recv()
                if (answers := self._answers.get(number)) is not None:
                    answers.put((kind, value))
        except (EOFError, OSError):
            self._ended = True
            for answers in list(self._answers.values()):
                answers.put(("error", _gone()))


def _gone() -> ConnectionError:
    return ConnectionError("the process that reads the store for this one has ended (killed, or out of memory)")


def serve(connection: Connection) -> None:
    sending = threading.Lock()
    stores: dict[Any, Store] = {}

    def answer(number: int, kind: str, value: Any = None) -> None:
        with sending:
            connection.send((number, kind, value))

    def read(number: int, store: Store, method: str, args: Any) -> None:
        try:
            found = getattr(store, method)(*args)
            for value in found if method in ITERATES else [found]:
                answer(number, "value", value if isinstance(value, (int, list, tuple)) else bytes(value))
            answer(number, "end")
        except (BrokenPipeError, ConnectionResetError):
            return  # the other end is gone
        except Exception as error:
            answer(number, "error", error)

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            while True:
                number, store, method, args = connection.recv()
                known = stores.setdefault((type(store).__name__, store.url, repr(sorted(_settings(store)))), store)
                pool.submit(read, number, known, method, args)
        except (EOFError, OSError):
            pool.shutdown(cancel_futures=True)


def _settings(store: Any) -> list[str]:
    return [f"{name}={value}" for name, value in vars(store).items() if isinstance(value, (str, int, float, bool))]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; this one ends with its process
    serve(Connection(int(sys.argv[1])))
