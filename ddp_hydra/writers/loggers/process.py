"""`python -m ddp_hydra.writers.loggers.process <descriptor>`: give the records of a job to one logger.

Through the descriptor come the `Order`, then records as bytes, and at last the job's status, a string. An `Answer` goes
back when the run has begun, and where something fails.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TextIO

from ddp_hydra.config import project, redact, targets
from ddp_hydra.console.text import message_of, printable, shorten, traceback_of
from ddp_hydra.record import Record
from ddp_hydra.storage.retry import Backoff
from ddp_hydra.writers.loggers import KILLED, Answer, Logger, Order, Refusal, ServiceRun

FLUSH_S = 1.0
LONGEST_WAIT_S = 10.0
ORPHAN_POLL_S = 0.5


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the job decides when the logger ends
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # a library's own process may live on
    sys.stdout = sys.stderr = output = RedactedOutput(sys.stderr)  # MLflow prints its address, perhaps with a password
    order = connection.recv()
    threading.Thread(target=_end_as_orphan, args=(os.getppid(), order.timeout_s), daemon=True).start()
    is_whole = Session(order, connection).run()
    output.end_line()
    if not is_whole:
        os._exit(1)  # without the exit handlers of libraries, which may wait for a service that is away


def _end_as_orphan(parent: int, timeout_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(ORPHAN_POLL_S)
    time.sleep(timeout_s)
    os._exit(1)


class RedactedOutput(io.TextIOBase):
    """Writes text to an open file, line by line, without secrets."""

    encoding = "utf-8"

    def __init__(self, file: TextIO) -> None:
        self._file, self._rest = file, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._file.write(f"{redact.without([line])[0]}\n")
        self._file.flush()
        return len(text)

    def end_line(self) -> None:
        if self._rest:
            self.write("\n")

    def fileno(self) -> int:
        return self._file.fileno()


class Session:
    """Runs one logger; `connection` leads to the job's process."""

    def __init__(self, order: Order, connection: Connection) -> None:
        self.order, self.connection = order, connection
        self.logger: Any = None
        self.warned: set[str] = set()
        self.lost = 0

    def run(self) -> bool:
        """Begin the run, give it all records, and end it. Return whether everything was sent."""
        job = self.order.job
        try:
            self.logger = self.instantiate()
            if isinstance(self.logger, Logger):
                self.logger.run_dir = job.run_dir
            started = self.repeat(lambda: self.logger.begin(job)) if hasattr(self.logger, "begin") else None
        except Exception as error:
            self.explain("error", error)
            return False
        if started is not None:
            self.answer(Answer("run", run=ServiceRun(str(started.id), redact.bare(started.url), started.note)))
        status = self.take_all()
        self.do("end", status)
        self.do("close")
        return not self.lost

    def instantiate(self) -> Any:
        if self.order.roots:
            project.make_importable(list(self.order.roots))
        from ddp_hydra.config import hydra_compat

        try:
            return hydra_compat.instantiate(self.order.node, _convert_="all")
        except Exception as error:
            target = str(self.order.node["_target_"])
            raise Refusal(f"{target}: {targets.explain(target, error)}") from error

    def take_all(self) -> str:
        flushed = time.monotonic()
        while True:
            try:
                message = self.connection.recv() if self.connection.poll(FLUSH_S) else None
            except (EOFError, ConnectionError):  # the job's process is gone
                message = KILLED
            if isinstance(message, bytes):
                self.do("write", Record.decode(message))
            if not isinstance(message, bytes) or time.monotonic() - flushed >= FLUSH_S:
                self.do("flush")
                flushed = time.monotonic()
            if isinstance(message, str):
                return message

    def do(self, method: str, *args: Any) -> None:
        """Call a method of the logger, if it has it; what the service refuses is lost, with one warning."""
        if not hasattr(self.logger, method):
            return
        try:
            self.repeat(lambda: getattr(self.logger, method)(*args))
        except Refusal as error:
            self.lost += 1
            self.explain("warning", error)

    def repeat(self, call: Callable[[], Any]) -> Any:
        backoff = Backoff(math.inf, longest_pause_s=LONGEST_WAIT_S)
        while True:
            try:
                found = call()
            except Refusal:
                raise
            except Exception as error:
                if not isinstance(self.logger, Logger):
                    raise Refusal(f"{type(error).__name__}: {message_of(error)}") from error
                if self.logger.is_refusal(error):
                    raise Refusal(str(error)) from error
                self.explain("away", error)
            else:
                if "away" in self.warned:
                    self.warned.discard("away")
                    self.answer(Answer("back"))
                return found
            backoff.wait()

    def explain(self, kind: str, error: Exception) -> None:
        """Write an error's traceback to the log, and answer with its message, once for each kind."""
        print(traceback_of(error), file=sys.stderr)  # noqa: T201
        if kind not in self.warned:
            self.warned.add(kind)
            name = "" if isinstance(error, Refusal) else f"{type(error).__name__}: "
            message = redact.without([printable(message_of(error)).strip()])[0].splitlines()
            advice = getattr(self.logger, "advice", "") or "Its log has more; results.loggers=[] leaves it out"
            self.answer(Answer(kind, shorten(name + (message[0] if message else ""), 400), advice))

    def answer(self, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # the job's process may be gone
            self.connection.send(answer)


if __name__ == "__main__":
    main()
