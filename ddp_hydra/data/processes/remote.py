"""Starts a process that makes batches, and asks it for them."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from ddp_hydra.data.processes import shared_batch

PROGRAM = "ddp_hydra.data.processes.program"
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a process ignores: the one that trains decides, and the other ends with it."""
END_S = 10.0
"""Seconds that a process may take to end; then it is killed."""


class Remote:
    """A process that makes batches.

    Args:
        dataset: pickled.
        seed: of its random generators.
        processes: how many make batches of this data set.
        own: returns a copy of a tensor, see `shared_batch.read`.
        heard: gets each of its reports.
        progress: called while it reads.

    Attributes:
        begun: set when it is ready, or has refused the data set, or has ended.
        refused: why it can't make batches of this data set; "" if it can.
    """

    def __init__(
        self,
        dataset: bytes,
        seed: int,
        processes: int,
        own: Callable[[Tensor], Tensor],
        heard: Callable[[Mapping[str, Any]], None],
        progress: Callable[[], None],
    ) -> None:
        self.own, self.heard, self.progress = own, heard, progress
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.write(dataset)  # a socket would take all of it only when the process has imported torch
            file.seek(0)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # it inherits that, until it ignores them
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, *map(str, (theirs.fileno(), seed, processes))],
                    stdin=file,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.begun, self.refused = threading.Event(), ""
        self._socket, self._connection = ours, Connection(os.dup(ours.fileno()))
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Mapping[str, Any]]] = {}
        self._ended = False
        self._memory: dict[int, mmap.mmap] = {}
        self._thread = threading.Thread(target=self._receive, name="batches", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Return how many batches it was asked for and has not made."""
        return len(self._asked)

    def ask(self, indices: list[int]) -> Callable[[], Any]:
        """Ask for a batch; return a function that waits for it, and raises what the data set raises.

        Raises:
            ConnectionError: the process has ended; the function raises it, too.
        """
        number, answer = next(self._numbers), Future[Mapping[str, Any]]()
        with self._lock:
            if self._ended:
                raise gone(self.process)
            self._asked[number] = answer
        self.tell(make=number, indices=indices)
        return lambda: self._batch(answer.result())

    def _batch(self, answer: Mapping[str, Any]) -> Any:
        """Return the batch of an answer, or raise its error."""
        if "error" in answer:
            raise pickle.loads(answer["error"])  # noqa: S301  from a process that this one has started
        try:
            return shared_batch.read(answer["structure"], self._memory_of(**answer["memory"]), self.own)
        finally:
            self.tell(free=answer["memory"]["slot"])

    def tell(self, **request: Any) -> None:
        """Send a request, and wait for no answer."""
        with self._lock, suppress(OSError):  # if it has ended, `_receive` learns of it
            self._connection.send(request)

    def _memory_of(self, slot: int, path: str, size: int) -> mmap.mmap | None:
        """Map a slot once, and again when it has grown."""
        if path and len(self._memory.get(slot, ())) != size:
            self._memory[slot] = shared_batch.mapped(path)
        return self._memory.get(slot)

    def _receive(self) -> None:
        try:
            with suppress(EOFError, OSError):  # the process has ended
                while True:
                    message = self._connection.recv()
                    if "number" in message:
                        self.heard(message)
                        self._asked.pop(message["number"]).set_result(message)
                    elif "progress" in message:
                        self.progress()
                    else:
                        self.refused = message.get("refused", "")
                        self.begun.set()
        finally:  # nobody waits for what can't come any more
            with self._lock:
                self._ended = True
                waiting = list(self._asked.values())
                self._asked.clear()
            for answer in waiting:
                answer.set_exception(gone(self.process))
            self.begun.set()

    def close(self) -> None:
        """Wait until the process has ended, as it was asked to; one that has not begun is killed."""
        if not self.begun.is_set():
            self.process.kill()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with suppress(OSError):  # macOS: the other end is closed
            self._socket.shutdown(socket.SHUT_RDWR)  # a process that it has left behind may hold the other end
        self._thread.join()
        self._connection.close()
        self._socket.close()


def gone(process: subprocess.Popen[bytes]) -> ConnectionError:
    """Return the error for a process that has ended by itself."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)
    code = process.returncode
    how = f"by signal {-code}" if code is not None and code < 0 else f"with code {code}"
    advice = "what it printed stands above, in the output of this rank"
    if code == -signal.SIGKILL:
        advice = "if that was for want of memory, type a smaller data.memory_mb, data.cache_mb or data.processes"
    return ConnectionError(f"the process that makes batches for this rank has ended {how}; {advice}")
