"""Runs a function on all ranks of a gang: `dispatch.run(client, fn, …)`.

    gang            starts the ranks together, and again after failures
    call            the function and its arguments; a script in its place
    background      a gang in a thread, with futures; the run directory of a user's own function
    attempt         one start of a gang, from its tasks to their ends, and the queue of its records
    placement       which worker gets which rank; workers: what is asked of them, and files from there
    health          decides which ranks are alive and make progress, also on restarts
    inline          the only rank, in this process

Its names are imported when they are first used: ranks without Dask are in this package, too, and need no `distributed`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_hydra.dispatch.gang import Call, Gang, Running, run, script, show, start

__all__ = ["Call", "Gang", "Running", "run", "script", "show", "start"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("ddp_hydra.dispatch.gang"), name)
