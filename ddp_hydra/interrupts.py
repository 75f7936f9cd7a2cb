"""Ctrl-C and SIGTERM: the first asks for a good end, the second ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """What the user of this process wants.

    Attributes:
        wanted: the user wants to end.
        patient: there is something to be saved first; otherwise the first signal ends at once, too.
    """

    def __init__(self) -> None:
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
        if not graceful or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.wanted = False
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Inside the block, somebody looks at `wanted`."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False

    def _on_signal(self, *_: Any) -> None:
        if self.wanted or not self.patient:
            raise KeyboardInterrupt
        self.wanted = True
