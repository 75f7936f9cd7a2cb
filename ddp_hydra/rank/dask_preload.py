"""Preloaded by workers that are children of the client: only the client reacts to Ctrl-C and a closed terminal."""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Ignore the signals; called by Dask when the worker starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
