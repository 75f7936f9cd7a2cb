"""`python -m ddp_hydra.writers.loggers.process`: give the records of a job to one logger.

Lines of JSON come through stdin: first the order, then records, `flush` where nothing comes for a while, and `end` with
the status. Answers go out as lines of JSON: `run` once it has begun, `warning`, `error` if there is no use in going on.
What libraries print goes to the logger's log file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TextIO

from ddp_hydra.config import project, redact, targets
from ddp_hydra.console.text import message_of, plain, shorten, traceback_of
from ddp_hydra.record import Record
from ddp_hydra.writers.loggers.base import KILLED, Logger, Refused, RunInfo

FLUSH_S = 1.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
ORPHAN_POLL_S = 0.5


def main() -> None:
    """Read the order, run the logger until the job ends, and exit with 0 if everything was sent."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the job decides when the logger ends
    incoming, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # a library that asks for a password would read records
    os.dup2(2, 1)
    output = RedactedOutput(sys.stderr)  # MLflow prints its address, which may hold a password
    sys.stdout = sys.stderr = output
    order = json.loads(incoming.readline())
    threading.Thread(target=_end_as_orphan, args=(os.getppid(), order["timeout_s"]), daemon=True).start()
    is_whole = Session(order, answers).run(incoming)
    output.end_line()
    if not is_whole:
        os._exit(1)  # without the exit handlers of libraries, which may wait for a service that is away


def _end_as_orphan(parent: int, timeout_s: float) -> None:
    """End this process some time after the job's process is gone."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_POLL_S)
    time.sleep(timeout_s)
    os._exit(1)


class RedactedOutput(io.TextIOBase):
    """Writes text to a file, line by line, without secrets.

    Args:
        file: an open text file.
    """

    encoding = "utf-8"

    def __init__(self, file: TextIO) -> None:
        self._file, self._rest = file, ""

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._file.write(f"{redact.without([line])[0]}\n")
        self._file.flush()
        return len(text)

    def end_line(self) -> None:
        """Write the last line, if it is not complete."""
        if self._rest:
            self.write("\n")

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._file.fileno()


class Session:
    """Runs one logger.

    Args:
        order: `node`, the logger's config; `job`, fields of `RunInfo`; `roots`, the layers of the project space.
        answers: where answers are written.
        wait: waits some seconds before something is repeated.
    """

    def __init__(self, order: dict[str, Any], answers: IO[str], wait: Callable[[float], Any] = time.sleep) -> None:
        self.order, self.answers, self.wait = order, answers, wait
        self.logger: Any = None
        self.warned: set[str] = set()
        self.lost = 0

    def run(self, incoming: IO[bytes]) -> bool:
        """Begin the run, give it all records, and end it. Return whether everything was sent."""
        job = RunInfo(**{**self.order["job"], "run_dir": Path(self.order["job"]["run_dir"])})
        try:
            self.logger = self.instantiate()
            if isinstance(self.logger, Logger):
                self.logger.run_dir = job.run_dir
            started = self.repeat(lambda: self.logger.begin(job)) if hasattr(self.logger, "begin") else None
        except Exception as error:
            self.explain("error", error)
            return False
        if started is not None:
            self.answer("run", {"id": started.id, "url": redact.bare(started.url), "note": started.note})
        status = self.take_all(incoming)
        self.do("end", status)
        self.do("close")
        return not self.lost

    def instantiate(self) -> Any:
        """Build the logger from its config."""
        if self.order["roots"]:
            project.make_importable([Path(root) for root in self.order["roots"]])
        from ddp_hydra.config import hydra_compat

        try:
            return hydra_compat.instantiate(self.order["node"], _convert_="all")
        except Exception as error:
            target = str(self.order["node"]["_target_"])
            raise Refused(f"{target}: {targets.explain(target, error)}") from error

    def take_all(self, incoming: IO[bytes]) -> str:
        """Give the logger all records; return the job's status."""
        flushed = time.monotonic()
        for line in incoming:
            message = json.loads(line)
            if "end" in message:
                self.do("flush")
                return str(message["end"])
            if "record" in message:
                self.do("write", Record.decode(message["record"]))
            if "flush" in message or time.monotonic() - flushed >= FLUSH_S:
                self.do("flush")
                flushed = time.monotonic()
        self.do("flush")
        return KILLED  # the job's process is gone

    def do(self, method: str, *args: Any) -> None:
        """Call a method of the logger, if it has it; what the service refuses is lost, with one warning."""
        if not hasattr(self.logger, method):
            return
        try:
            self.repeat(lambda: getattr(self.logger, method)(*args))
        except Refused as error:
            self.lost += 1
            self.explain("warning", error)

    def repeat(self, call: Callable[[], Any]) -> Any:
        """Call until the service answers.

        Raises:
            Refused: to repeat it is no use. Everything that a writer without `flush` raises counts as that.
        """
        wait_s = FIRST_WAIT_S
        while True:
            try:
                found = call()
            except Refused:
                raise
            except Exception as error:
                if not isinstance(self.logger, Logger):
                    raise Refused(f"{type(error).__name__}: {message_of(error)}") from error
                self.explain("away", error)
            else:
                if wait_s > FIRST_WAIT_S and "away" in self.warned:
                    self.warned.discard("away")
                    self.answer("back", "")
                return found
            self.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def explain(self, kind: str, error: Exception) -> None:
        """Write an error's traceback to the log, and answer with its message, once for each kind."""
        print(traceback_of(error), file=sys.stderr)  # noqa: T201
        if kind not in self.warned:
            self.warned.add(kind)
            name = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
            message = redact.without([plain(message_of(error)).strip()])[0].splitlines()
            advice = getattr(self.logger, "advice", "") or "Its log has more; results.loggers=[] leaves it out"
            self.answer(kind, [shorten(name + (message[0] if message else ""), 400), advice])

    def answer(self, kind: str, content: Any) -> None:
        """Send an answer to the job's process, if it is still there."""
        with contextlib.suppress(OSError):
            self.answers.write(json.dumps({kind: content}) + "\n")
            self.answers.flush()


if __name__ == "__main__":
    main()
