"""Preloaded by workers that are children of the client: Ctrl-C and a closed terminal are the client's to answer."""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Called by Dask when the worker starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
