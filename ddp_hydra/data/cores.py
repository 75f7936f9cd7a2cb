"""Says how many cores a rank has for its data."""

from __future__ import annotations

import os


def cores_per_rank() -> int:
    """Return the cores of this host that this process may use, divided among the ranks of this host; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
