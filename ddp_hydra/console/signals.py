"""Ctrl-C, SIGTERM and a terminal that is closed: the first asks for a good end, the second ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
"""Those that a terminal sends to all processes of a command at once; only the first of them is to answer."""
SECOND = "A second one ends at once"


class Interrupts:
    """What the user of this process wants.

    Args:
        notice: returns what is said at the first signal; "" for nothing.

    Attributes:
        wanted: the user wants to end.
        patient: there is something to be saved first; otherwise the first signal ends at once, too.
    """

    def __init__(self, notice: Callable[[], str] = lambda: f"ending, once all is saved. {SECOND}") -> None:
        self.notice = notice
        self.wanted = False
        self.patient = False

    @contextmanager
    def caught(self, graceful: bool = True) -> Iterator[None]:
        """Catch the signals inside the block, if it is in the main thread.

        Args:
            graceful: otherwise they do what they did before.

        Raises:
            KeyboardInterrupt: where nothing is to be saved, or at the second.
        """
        if not graceful:
            yield
            return
        self.wanted = False
        with _handled(self._on_signal):
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block, somebody looks at `wanted`."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.wanted or not self.patient:
            raise KeyboardInterrupt
        self.wanted = True
        if said := self.notice():
            say(f"{'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}: {said}")


@contextmanager
def raised() -> Iterator[None]:
    """Have each of the signals raise KeyboardInterrupt inside the block, if it is in the main thread."""
    with _handled(signal.default_int_handler):
        yield


@contextmanager
def held_back(numbers: Iterable[int] = OF_TERMINALS) -> Iterator[None]:
    """Have signals come after the block: an exception in the middle of an import would be lost, or told at length.

    Threads that are started inside the block never hear of them, nor do their processes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_at_once() -> None:
    """Have the signals end this process in a line, while it imports and composes and has nothing to tidy up.

    An exception in the middle of that would be told at length, lost, or taken for another by who catches it.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _heard():
            signal.signal(number, _leave)


def leave_tidily() -> None:
    """Have the signals raise KeyboardInterrupt again from now on, where they would end this process at once."""
    if threading.current_thread() is threading.main_thread():
        for number in _heard():
            if signal.getsignal(number) is _leave:
                signal.signal(number, signal.default_int_handler)


def say(line: str) -> None:
    """Write a line to stderr, also in the middle of whatever else is being written there."""
    with contextlib.suppress(OSError):
        os.write(2, f"{chr(10) if os.isatty(2) else ''}{line}\n".encode())


def _leave(number: int, frame: Any) -> NoReturn:
    say("interrupted")
    os._exit(130)


def _heard() -> list[signal.Signals]:
    """All of them, but SIGHUP where `nohup` has it ignored."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def _handled(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _heard()}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was if was is not None else signal.SIG_DFL)
