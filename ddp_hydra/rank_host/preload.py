"""Preloaded by workers that are children of the client: Ctrl-C is the client's to answer, not theirs."""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Called by Dask when the worker starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
