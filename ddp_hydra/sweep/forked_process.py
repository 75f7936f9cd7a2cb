"""A forked process that says what comes of its work, and dies with us.

Forked, so that it has all that Hydra knows (the composed configs, resolvers, the task function, be it a closure) and
nothing has to be imported anew. The process that forks runs no threads of ours.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddp_hydra.console.signals import SIGNALS
from ddp_hydra.rank.processes import die_with_parent, kill_group

KILL_S = 5.0
"""How long a process that was told to end may take."""


class Child:
    """A process at work.

    What it sends us is unpickled: it is a fork of this very process, and nobody else has its pipe.

    Args:
        work: called there with its end of the pipe; what it returns is sent last.
        output: the file that gets what it prints, appended; None leaves it on the terminal.
        not_its: descriptors of ours that it closes.
        survives: it looks itself whether we are still there, and needs time to end well.
    """

    def __init__(
        self,
        work: Callable[[Connection], Any],
        output: Path | None = None,
        not_its: Sequence[int] = (),
        survives: bool = False,
    ) -> None:
        self.output, self.not_its, self.survives = output, not_its, survives
        self.pipe, theirs = multiprocessing.Pipe()
        self.values: list[Any] = []
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=self._live, args=(work, theirs, os.getpid()))
        with warnings.catch_warnings():
            # Python 3.12 warns of threads in general; those there may be here are idle ones of libraries.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            self.process.start()
        theirs.close()

    def _live(self, work: Callable[[Connection], Any], theirs: Connection, us: int) -> None:
        os.setpgid(0, 0)  # Ctrl-C is ours to answer
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler)
        if not self.survives:
            die_with_parent(us)
        self.pipe.close()
        for descriptor in self.not_its:
            os.close(descriptor)
        if self.output is not None:
            redirect(self.output)
        said = work(theirs)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # Python tidies up, and shall get to its end
        theirs.send(said)

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def hear(self) -> bool:
        """Take what it has said; False when it has ended, and nothing more will come."""
        try:
            while self.pipe.poll():
                self.values.append(self.pipe.recv())
        except (EOFError, OSError):
            self.process.join()
            return False
        return True

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, timeout_s: float = KILL_S) -> None:
        """Have it end: by a signal, and where that does not help, by force; with all that it has started."""
        if self.process.is_alive():
            self.signal(signal.SIGINT)
            self.process.join(timeout_s)
        kill_group(self.pid)
        self.process.join()
        self.pipe.close()

    def how_it_ended(self) -> str:
        """For a sentence about a process that has said nothing."""
        code = self.process.exitcode or 0
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


def listen(children: Sequence[Child], timeout_s: float) -> None:
    """Wait until one of them has something to say, or has ended."""
    connection.wait([child.pipe for child in children], timeout_s)


def redirect(output: Path) -> None:
    """Send to a file what this process prints from now on, and what its own children print."""
    output.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
