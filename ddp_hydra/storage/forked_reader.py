"""Reads stores in processes that were forked from one that has read from the network, as a DataLoader's workers are.

The client of object stores has threads, which a fork does not copy: in a forked process it would hang. So such a
process starts another program, this module, which reads for it and sends what it read through a socket.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, wraps
from inspect import isgeneratorfunction
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

_THREADS = 32
# The client of object stores starts threads that a fork does not copy: used on both sides of one, it hangs.
_used = False
_forked = False
_starting = threading.Lock()
Method = TypeVar("Method", bound=Callable[..., Any])


def note_use() -> None:
    """Note that this process has used a client that does not work in its forks.

    Raises:
        RuntimeError: this is such a fork.
    """
    global _used
    if _forked:
        raise RuntimeError(
            "a store was used in a process that then forked this one: write in that one, or start processes by 'spawn'"
        )
    _used = True


def _note_fork() -> None:
    global _forked
    _forked = _used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def by_reader(method: Method) -> Method:
    """Have the `Reader` call a method of a store where this process is a fork."""

    @wraps(method)
    def call(store: Any, *args: Any, **options: Any) -> Any:
        if not _forked:
            return method(store, *args, **options)
        with _starting:
            reader = _reader_of(os.getpid())
        found = reader.iterate(store, method.__name__, args, options)
        return found if isgeneratorfunction(method) else next(found)

    return cast(Method, call)


class Reader:
    """A program that reads stores for this process, and ends with it. Each request has a connection of its own."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join(filter(None, sys.path))
            self.program = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )

    def iterate(self, store: Any, method: str, args: Any, options: Any) -> Iterator[Any]:
        """Yield what a method of a store returns, as a list if it is no generator."""
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as connection:
            try:
                with theirs:
                    socket.send_fds(self._requests, [b"."], [theirs.fileno()])
                connection.send((pickle.dumps(store), method, args, options))
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


@lru_cache(1)
def _reader_of(pid: int) -> Reader:
    return Reader()


def serve(requests: socket.socket) -> None:
    """Answer requests until the other end is closed."""
    stores: dict[bytes, Any] = {}

    def answer(connection: Connection) -> None:
        with connection:
            try:
                store, method, args, options = connection.recv()
                if store not in stores:
                    stores.setdefault(store, pickle.loads(store))  # noqa: S301 (from the process that started this one)
                found = getattr(stores[store], method)(*args, **options)
                for value in found if isinstance(found, Iterator) else [found]:
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


def main() -> None:
    """Read for the process that has started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; this one ends with its process
    serve(socket.socket(fileno=int(sys.argv[1])))
