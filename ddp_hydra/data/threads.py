"""Tells which data sets several threads may read at once, and how many cores a rank has for its data."""

from __future__ import annotations

import os
from typing import Any

_METHODS = frozenset(
    [
        "__call__",
        "__getitem__",
        "__getitems__",
        "__iter__",
        "collate",
        "draw",
        "expect",
        "fetch",
        "forward",
        "make_image",
        "of_jpeg",
        "of_rank",
        "sample_target",
        "target",
    ]
)
_PARTS = ("transform", "target_transform", "collate", "collate_fn")


def is_thread_safe(data: Any) -> bool:
    # The class says so, by `thread_safe = True`; the transforms that it holds must say so, too. A subclass that
    # defines a method that makes samples says it anew.
    if not getattr(data, "thread_safe", False):
        return False
    own = getattr(data, "__dict__", {})
    if "thread_safe" not in own:
        for cls in type(data).__mro__:
            if "thread_safe" in vars(cls):
                break
            if not _METHODS.isdisjoint(vars(cls)):
                return False
    return all(is_thread_safe(part) for name in _PARTS if (part := own.get(name)) is not None)


def cores_per_rank() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
