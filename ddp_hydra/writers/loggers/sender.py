"""Sends a job's records to a logger's process, without ever waiting for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ddp_hydra
from ddp_hydra.record import Record

MAX_RECORDS = 20_000
MAX_BYTES = 64 * 2**20
"""What waits for a logger; beyond it, the oldest records are dropped."""
KINDS = ("start", "metrics", "text", "image", "file", "log")
IDLE_S = 1.0
JOIN_S = 5.0

log = logging.getLogger(__name__)


class RecordBuffer:
    """Holds lines for one reader, up to a limit; `put` never waits.

    Args:
        max_lines: lines to hold.
        max_bytes: bytes to hold.

    Attributes:
        dropped: how many lines were too many.
    """

    def __init__(self, max_lines: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self.max_lines, self.max_bytes = max_lines, max_bytes
        self.dropped = 0
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, line: bytes) -> None:
        """Add a line; if there are too many, drop the oldest."""
        with self._changed:
            if self._is_closed:
                return
            self._lines.append(line)
            self._bytes += len(line)
            while len(self._lines) > self.max_lines or self._bytes > self.max_bytes:
                self._bytes -= len(self._lines.popleft())
                self.dropped += 1
            self._changed.notify()

    def take(self, timeout_s: float) -> bytes | None:
        """Return the oldest line; None if none comes in time, b"" once the buffer is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._is_closed, timeout_s)
            if self._lines:
                self._bytes -= len(self._lines[0])
                return self._lines.popleft()
            return b"" if self._is_closed else None

    def close(self) -> None:
        """Take no more lines."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class LoggerProcess:
    """Runs a logger in a process of its own. It is a writer, none of whose methods fails or waits.

    Args:
        name: of the logger, for messages.
        order: what the process begins with, see `process.Session`.
        log_file: gets what its libraries print.
        on_run: called in another thread with the run's `id` and `url` at the service.
        timeout_s: how long the process may go on after the job's process has died.
        buffer: what waits for the process.
    """

    def __init__(
        self,
        name: str,
        order: Mapping[str, Any],
        log_file: Path,
        on_run: Callable[[dict[str, str]], None],
        timeout_s: float,
        buffer: RecordBuffer | None = None,
    ) -> None:
        self.name, self.on_run, self.log_file = name, on_run, log_file
        self.buffer = buffer or RecordBuffer()
        self.has_failed = self.has_refused = self.is_away = False
        log_file.parent.mkdir(parents=True, exist_ok=True)
        path = [str(Path(ddp_hydra.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        with log_file.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ddp_hydra.writers.loggers.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
                start_new_session=True,  # a Ctrl-C in the terminal is for the job
            )
        self._order = json.dumps({**order, "timeout_s": timeout_s}).encode() + b"\n"
        self._threads = [
            threading.Thread(target=work, name=f"{name} {work.__name__}", daemon=True)
            for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def write(self, record: Record) -> None:
        """Queue a record."""
        if record.kind in KINDS and not self.has_failed:
            self.buffer.put(b'{"record": %s}\n' % json.dumps(record.encode().decode()).encode())

    def close(self) -> None:
        """Do nothing: the end of the records is not the end of the job; see `finish`."""

    def finish(self, status: str) -> None:
        """Tell the logger how the job ended, without waiting for it."""
        self.buffer.put(json.dumps({"end": status}).encode() + b"\n")
        self.buffer.close()

    def has_ended(self, until: float) -> bool:
        """Wait for the process; return whether it has ended by a time of the monotonic clock."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        return self.process.returncode is not None

    def wait(self, until: float) -> str:
        """Wait for the process to end, and end it if it does not.

        Args:
            until: a time of the monotonic clock, in seconds.

        Returns:
            Why records are missing at the service; "" if none is.
        """
        try:
            is_late = not self.has_ended(until)
        finally:
            self.kill()
        if self.has_failed:
            return ""  # has been said
        if is_late:
            return "it had not taken everything when the job ended"
        if self.process.returncode and not self.has_refused:
            return f"its process ended with {self.process.returncode}"
        dropped = self.buffer.dropped
        return f"it was too slow, and {dropped} records were left out" if dropped else ""

    def kill(self) -> None:
        """End the process and those that it has started, if it has not ended well by itself."""
        if self.process.poll() != 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.buffer.close()
        for thread in self._threads:
            thread.join(JOIN_S)
        with contextlib.suppress(OSError):
            if self.log_file.stat().st_size == 0:
                self.log_file.unlink()

    def _send(self) -> None:
        """Write lines into the process's pipe; it blocks while the process is busy."""
        assert self.process.stdin is not None
        is_idle = True
        with contextlib.suppress(OSError), self.process.stdin as pipe:
            pipe.write(self._order)
            pipe.flush()
            while (line := self.buffer.take(IDLE_S)) != b"":
                if line or not is_idle:
                    pipe.write(line or b'{"flush": 1}\n')
                    pipe.flush()
                is_idle = line is None

    def _receive(self) -> None:
        """Take the answers of the process."""
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            for line in pipe:
                with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError):
                    for kind, content in json.loads(line).items():
                        self._on_answer(kind, content)

    def _on_answer(self, kind: str, content: Any) -> None:
        if kind == "run":
            self.on_run({"id": str(content["id"]), "url": str(content["url"])})
            for line in filter(None, (content["url"], content["note"])):
                log.info("%s: %s", self.name, line)
        elif kind == "away":
            self.is_away = True
            message, advice = content
            log.warning(
                "%s does not answer (%s): the job goes on, and its records wait. %s", self.name, message, advice
            )
        elif kind == "back":
            self.is_away = False
            log.warning("%s answers again", self.name)
        elif kind == "warning":
            self.has_refused = True
            log.warning("%s did not take a record (%s): the job goes on. See %s", self.name, content[0], self.log_file)
        elif kind == "error":
            self.has_failed = True
            message, advice = content
            log.warning("%s gets no records (%s): the job goes on. %s", self.name, message, advice)
