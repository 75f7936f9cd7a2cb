"""Runs a function on all ranks of a gang: `dispatch.run(client, fn, …)`.

Its names are imported when they are first used: ranks without Dask are in this package, too, and need no `distributed`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_hydra.dispatch.background import Running
    from ddp_hydra.dispatch.call import Call, show
    from ddp_hydra.dispatch.gang import Gang, run, start
    from ddp_hydra.dispatch.user_script import script

__all__ = ["Call", "Gang", "Running", "run", "script", "show", "start"]
_MODULES = {
    "Call": "call",
    "Gang": "gang",
    "Running": "background",
    "run": "gang",
    "script": "user_script",
    "show": "call",
    "start": "gang",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
