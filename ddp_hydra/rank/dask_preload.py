"""Preloaded by workers of a local cluster: only the client reacts to Ctrl-C and a closed terminal."""

from __future__ import annotations

import signal
from typing import Any

in_client = False
"""Whether this process is the client's, whose threads are the workers."""
is_local = False
"""Whether the worker is one of a local cluster, whose nannies are threads of the client's process."""


def dask_setup(worker: Any) -> None:
    """Ignore the signals in a process of the worker's own; called by Dask when the worker starts."""
    global in_client, is_local
    in_client, is_local = not worker.nanny, True
    if not in_client:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
