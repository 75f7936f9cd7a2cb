"""Preloaded by workers of a local cluster: only the client reacts to Ctrl-C and a closed terminal."""

from __future__ import annotations

import signal
from typing import Any

in_client = False
"""Whether this process is the client's, whose threads are the workers."""


def dask_setup(worker: Any) -> None:
    """Ignore the signals in a process of the worker's own; called by Dask when the worker starts."""
    global in_client
    in_client = not worker.nanny
    if not in_client:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
