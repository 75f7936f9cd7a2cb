"""Ctrl-C at a known moment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.warm_server import PATIENCE_S

WAITS = ("wait", "join", "_wait_for_tstate_lock")
"""Functions of `threading` that wait; others only look."""


@contextlib.contextmanager
def interrupt_once_waiting(function: Callable[..., Any]) -> Iterator[None]:
    """Send SIGINT to this process as soon as its main thread waits for another thread, inside a function."""

    def is_waiting() -> bool:
        frame = top = sys._current_frames()[threading.main_thread().ident]
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        return frame is not None and top.f_code.co_filename == threading.__file__ and top.f_code.co_name in WAITS

    def strike() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_waiting() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        thread.join()
