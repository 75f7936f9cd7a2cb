"""Handles the terminal: signals, and what is printed after the reader has gone (`| head`, a closed terminal).

Ctrl-C, SIGTERM and a closed terminal: the first signal asks for a regular end, the second ends at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to all processes of a command at once; only the first process may react."""
SECOND = "A second one ends at once"


def default_notice() -> str:
    return f"ending, once all is saved. {SECOND}"


class Interrupts:
    """Notes the signals by which the user asks this process to end.

    Args:
        notice: returns the line to print at the first signal; "" for none.

    Attributes:
        wanted: whether the user wants the process to end.
        is_deferring: whether somebody looks at `wanted`; otherwise the first signal ends the process at once, too.
    """

    def __init__(self, notice: Callable[[], str] = default_notice) -> None:
        self.notice = notice
        self.wanted = False
        self.is_deferring = False

    @contextmanager
    def caught(self, graceful: bool = True) -> Iterator[None]:
        """Catch the signals inside the block, if it is in the main thread."""
        if not graceful:
            yield
            return
        self.wanted = False
        with handled(self._on_signal):
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Have the first signal only set `wanted`, which the code inside the block has to look at."""
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.wanted or not self.is_deferring:
            raise KeyboardInterrupt
        self.wanted = True
        if notice := self.notice():
            print_line(f"{'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}: {notice}")


def own_handler(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    """Return a handler for this process alone: a process that it forks ends by the signal, as it would without one."""
    owner = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() == owner:
            handler(number, frame)
        elif number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handle


@contextmanager
def handled(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Call a handler for each of the signals inside the block, if it is in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = own_handler(handler)
    before = {number: signal.signal(number, handler) for number in _handled_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # somebody wants it to be ignored until the process ends
                signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)


@contextmanager
def held_back(signals: Collection[signal.Signals] = OF_TERMINALS) -> Iterator[None]:
    """Deliver signals after the block, where an exception would do harm.

    In an import or a search for garbage it would be lost, or shown with a traceback. Right after a fork it would run
    this process's code in both processes; the new process has to unblock the signals itself. Threads that are started
    inside the block never get them. Other threads do, and Python then calls the handler in the main thread: there, it
    only notes the signal.
    """
    noted: list[int] = []
    note = own_handler(lambda number, frame: noted.append(number))
    handlers: dict[int, Any] = {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, note)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in reversed(handlers):  # the first one, SIGINT, may raise from then on
            if signal.getsignal(number) is note:  # else the block has set another one
                signal.signal(number, handlers[number])
        for one in dict.fromkeys(noted):
            signal.raise_signal(one)


class SignalExit:
    """The handler of a signal that ends this process with one line."""

    def __init__(self, tidy: Callable[[], object]) -> None:
        self.tidy = tidy

    def __call__(self, number: int, frame: Any) -> NoReturn:
        print_line("interrupted")
        with contextlib.suppress(Exception):
            self.tidy()
        os._exit(130)


def leave_at_once(tidy: Callable[[], object] = lambda: None) -> None:
    """Have the signals end this process with one line, while it imports and composes.

    An exception in the middle of that would be shown with a traceback, lost, or caught as something else.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _handled_signals():
            signal.signal(number, SignalExit(tidy))


def leave_tidily() -> None:
    """Undo `leave_at_once`: have the signals raise KeyboardInterrupt again."""
    if threading.current_thread() is threading.main_thread():
        for number in _handled_signals():
            if isinstance(signal.getsignal(number), SignalExit):
                signal.signal(number, signal.default_int_handler)


def print_line(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{chr(10) if os.isatty(2) else ''}{line}\n".encode())


def _handled_signals() -> list[signal.Signals]:
    """Return all signals, but not SIGHUP if `nohup` ignores it."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def open_standard_files() -> None:
    """Open /dev/null in the place of standard files that are closed, as some daemons and cron jobs start a command.

    A socket or pipe would take their descriptors, and processes that are started later would write there.
    """
    for name, descriptor in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        try:
            os.fstat(descriptor)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == descriptor, "the lowest descriptor that is free"
            os.set_inheritable(descriptor, True)
            file = open(descriptor, "w" if descriptor else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, file)
            setattr(sys, f"__{name}__", file)


class LastingFile(io.FileIO):
    """Writes to a file descriptor, and drops what cannot be written.

    Attributes:
        failed: the first error, but for that of a reader who has gone.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        """Write as much as one call can; what nobody reads any more counts as written."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if not self._has_lost_reader(error):
                self.failed = self.failed or error
            return memoryview(data).nbytes

    def _has_lost_reader(self, error: OSError) -> bool:
        if error.errno == errno.EIO:  # of a terminal; a disk's is a failure
            return stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return error.errno in (errno.EPIPE, errno.ECONNRESET)


def unwritten() -> OSError | None:
    """Return why standard output has lost something since `lasting` began; None if only its reader has gone."""
    if sys.stdout is not None:
        sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw.failed if isinstance(raw, LastingFile) else None


def printed(text: str) -> None:
    """Print to a standard output that may be the user's own, which may lack characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)  # noqa: T201


@contextmanager
def lasting() -> Iterator[None]:
    """Let nothing inside the block fail because nobody reads what it prints, or the encoding lacks a character.

    Streams that a test or a notebook uses instead of the standard ones are not changed.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = _lasting(sys.stdout) if sys.stdout is sys.__stdout__ else sys.stdout
    sys.stderr = _lasting(sys.stderr) if sys.stderr is sys.__stderr__ else sys.stderr
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: Any) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # None if the descriptor was closed before Python began
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = LastingFile(stream.fileno())
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",  # what the terminal's encoding lacks
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
