"""Runs a function in a forked process that sends messages to this one and ends with it.

The process is forked, so that it has all that Hydra knows (the composed configs, the resolvers, the task function, even
a closure) and imports nothing again. The process that forks runs no threads of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddp_hydra import forked
from ddp_hydra.console.signals import SIGNALS, held_back
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.processes import die_with_parent, kill_group

KILL_S = 5.0
"""How long a process may take to end after a signal."""
LOCKS: set[int] = set()
"""File descriptors that hold locks of this process. A forked one closes them: else the locks would outlive this one."""


class ForkedProcess:
    """Starts a process.

    Its messages are unpickled, because it is a fork of this very process, and no other process has its pipe.

    Args:
        work: called there with its end of the pipe; what it returns is the last message.
        output: the file that its output is appended to; None leaves the output on the terminal.
        watches_parent: it ends by itself when this process is gone; otherwise it is killed then.

    Attributes:
        messages: those received, the oldest first.
    """

    def __init__(
        self, work: Callable[[Connection], Any], output: Path | None = None, watches_parent: bool = False
    ) -> None:
        self.output, self.watches_parent = output, watches_parent
        self.pipe, theirs = multiprocessing.Pipe()
        self.messages: list[Any] = []
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=self._main, args=(work, theirs, os.getpid()))
        with held_back(SIGNALS), warnings.catch_warnings():
            # Python 3.12 warns of any threads; the only ones that may be here are idle threads of libraries.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            self.process.start()
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(self.pid, self.pid)  # so that `end` can kill its group from now on
        theirs.close()

    def _main(self, work: Callable[[Connection], Any], pipe: Connection, parent: int) -> None:
        try:
            self._run(work, pipe, parent)
        except KeyboardInterrupt:
            sys.exit(130)  # without a traceback: it was asked to end
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # Python tidies up from here on, and must not be interrupted
            forked.end()

    def _run(self, work: Callable[[Connection], Any], pipe: Connection, parent: int) -> None:
        # A garbage collection would touch, and so copy, all memory that is shared with the parent. The parent freezes
        # only what it has imported: what it made since would never be collected there.
        forked.begin()
        gc.enable()
        os.setpgid(0, 0)  # Ctrl-C is handled by the parent
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if not self.watches_parent:
            die_with_parent(parent)
        self.pipe.close()
        while LOCKS:
            os.close(LOCKS.pop())
        if self.output is not None:
            redirect(self.output)
        result = work(pipe)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the result must arrive
        pipe.send(result)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def receive(self) -> bool:
        """Receive all messages that are there; return False if the process has ended and no more can come."""
        try:
            while self.pipe.poll():
                message = self.pipe.recv_bytes()
                # One with a class that only that process can import is dropped: its exit code and output have to do.
                with contextlib.suppress(Exception):
                    self.messages.append(pickle.loads(message))  # noqa: S301
        except (EOFError, OSError):
            self.process.join()
            return False
        return True

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, timeout_s: float = KILL_S) -> None:
        """End it and all processes that it has started: first by SIGINT, after the timeout by SIGKILL."""
        if self.process.is_alive():
            self.signal(signal.SIGINT)
            self.process.join(timeout_s)
        kill_group(self.pid)
        self.process.join()
        self.pipe.close()

    def describe_end(self) -> str:
        """Return how it ended, as a part of a sentence, for a process that has sent no result."""
        code = self.process.exitcode or 0
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


def wait_for_message(processes: Sequence[ForkedProcess], timeout_s: float) -> None:
    connection.wait([process.pipe for process in processes], timeout_s)


def redirect(output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()


def lock(folder: Path) -> int:
    """Keep other processes from running a sweep in the same folder; return what holds the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"another sweep runs in {folder}: wait for it, or give another hydra.sweep.dir") from None
    LOCKS.add(handle)
    return handle


def unlock(handle: int) -> None:
    LOCKS.remove(handle)
    os.close(handle)
