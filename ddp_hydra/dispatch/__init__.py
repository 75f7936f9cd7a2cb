"""Runs a function on all ranks of a gang: `dispatch.run(client, fn, …)`.

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
