"""Preloaded by the Dask workers of a job whose ranks are to tell which worker they belong to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def dask_setup(worker: Any) -> None:
    """Called by Dask when the worker starts; its ranks inherit its variables."""
    os.environ["BENCH_WORKER"] = str(os.getpid())
    Path(os.environ["BENCH_FOLDER"], f"worker-{os.getpid()}").touch()
