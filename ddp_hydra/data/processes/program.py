"""Makes the batches of a data set for another process.

    python -m ddp_hydra.data.processes.program <socket's fd> <seed> <processes> < pickled data set

Through the socket come requests: {"make": number, "indices": …}, {"epoch": …}, {"expect": …}, {"elsewhere": indices},
{"free": slot}, {"end": true}. It answers {"number": …} with a batch or an error, and with what reading has cost so far;
while it reads, {"progress": true}. Several batches are made at a time, as many as the other process asks for. It ends
when its socket is closed.
"""

from __future__ import annotations

import math
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from ddp_hydra.data.batch import make_batch
from ddp_hydra.data.processes.remote import IGNORED
from ddp_hydra.data.processes.shared_batch import Slot

AT_A_TIME = 64
"""The most batches that are made at a time."""
SAY_S = 1.0


class Program:
    """Answers the requests that come through a connection.

    Args:
        connection: to the process that trains.
        seed: of the random generators.
        processes: how many make batches of this data set.
    """

    def __init__(self, connection: Connection, seed: int, processes: int) -> None:
        self.connection = connection
        self.seed, self.processes = seed, processes
        self.sending = threading.RLock()
        self.slots: list[Slot] = []
        self.free: list[int] = []
        self.told = 0  # bad samples
        self.said_s = -math.inf
        self.dataset: Any = None

    def serve(self) -> None:
        """Answer until the other end is closed."""
        pool = ThreadPoolExecutor(AT_A_TIME, "batch")
        if not self.begin():
            return
        while "end" not in (request := self.request()):
            self.take(request, pool)
        pool.shutdown(wait=False, cancel_futures=True)
        if hasattr(self.dataset, "close"):
            self.dataset.close()

    def request(self) -> dict[str, Any]:
        """Return the next request: to end, if the other process has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return {"end": True}

    def send(self, answer: dict[str, Any]) -> None:
        """Send an answer; if the other process has ended, `request` learns of it."""
        with self.sending, suppress(OSError):
            self.connection.send(answer)

    def begin(self) -> bool:
        """Unpickle the data set; say whether that went well."""
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        torch.manual_seed(self.seed)
        try:
            self.dataset = pickle.load(sys.stdin.buffer)  # noqa: S301  from the process that started this one
        except Exception as error:
            self.send({"refused": f"{type(error).__name__}: {error}"})
            return False
        if hasattr(self.dataset, "share"):
            self.dataset.share(self.processes)
        self.send({"ready": True})
        return True

    def take(self, request: dict[str, Any], pool: ThreadPoolExecutor) -> None:
        """Begin what is asked."""
        if "make" in request:
            pool.submit(self.make, request["make"], request["indices"])
        elif "epoch" in request:
            self.dataset.set_epoch(request["epoch"])
        elif "expect" in request:
            self.dataset.expect(request["expect"])
        elif "elsewhere" in request:
            self.dataset.read_elsewhere(request["elsewhere"])
        else:
            self.free.append(request["free"])

    def make(self, number: int, indices: list[int]) -> None:
        """Make a batch, and send it."""
        try:
            batch = make_batch(self.dataset, indices, self.progress)
            with self.sending:
                number_of_slot = self.free.pop() if self.free else self.new_slot()
            slot = self.slots[number_of_slot]
            structure = slot.write(batch)
            memory = {"slot": number_of_slot, "path": slot.path, "size": slot.size}
            answer = {"structure": structure, "memory": memory}
            with self.sending:  # the last report is the newest
                self.send({"number": number, **answer, **self.report(indices)})
        except BaseException as error:  # else the other process would wait for ever
            self.send({"number": number, "error": _packed(error)})

    def progress(self) -> None:
        """Say once a second that samples are being read."""
        if time.monotonic() - self.said_s >= SAY_S:
            self.said_s = time.monotonic()
            self.send({"progress": True})

    def new_slot(self) -> int:
        """Add a slot; return its number."""
        self.slots.append(Slot())
        return len(self.slots) - 1

    def report(self, indices: list[int]) -> dict[str, Any]:
        """Return what reading has cost so far and, where there are new ones, which samples are bad."""
        found: dict[str, Any] = {}
        if hasattr(self.dataset, "stats"):
            found["stats"] = self.dataset.stats()
        bad = getattr(self.dataset, "bad", None) or {}
        if len(bad) > self.told:
            self.told = len(bad)
            found |= {"bad": dict(bad), "bad_counts": dict(getattr(self.dataset, "bad_counts", {}))}
        if bad and hasattr(self.dataset, "error_of"):
            found["errors"] = {index: error for index in indices if (error := self.dataset.error_of(index))}
        return found


def _packed(error: BaseException) -> bytes:
    """Pickle an error; one that can't be pickled becomes a RuntimeError. It tells where it was raised."""
    where = "".join(traceback.format_tb(error.__traceback__)[1:]).rstrip()
    error.add_note(f"in the process that reads the data:\n{where}")
    try:
        packed = pickle.dumps(error.with_traceback(None))
        pickle.loads(packed)  # noqa: S301  some can be pickled, and not unpickled
    except Exception:
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        substitute.add_note(error.__notes__[-1])
        return pickle.dumps(substitute)
    return packed


if __name__ == "__main__":
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)  # threads of the data set share the cores
    code = 1
    try:
        Program(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])).serve()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # a thread that still reads is not waited for
