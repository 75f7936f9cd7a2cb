"""ddp_hydra: a Hydra config describes a training job, Dask places its ranks, DistributedDataParallel trains.

From Python and notebooks, `run` trains a job, `connect` keeps a cluster for several, and `Run` looks at a run. In a
job, `log` logs numbers from anywhere. They are imported when they are first used: ranks and workers import this
package, too, and need no `api`. Their types are in `__init__.pyi`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__version__ = "0.2.0"
_PLACES = {"Run": "api:Run", "connect": "api:connect", "run": "api:run", "log": "results:log_mean"}
if sys.platform == "win32":
    _WHY_NOT = (
        "ddp_hydra runs on Linux and macOS: on Windows, install it in WSL (type wsl --install), from where "
        "cluster=remote cluster.address=tcp://<host>:8786 also trains on other machines"
    )
    if any(name == "-m" or "ddp-hydra" in name for name in sys.argv[:1]):
        sys.exit(f"ddp_hydra: {_WHY_NOT}")
    raise ImportError(_WHY_NOT)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, place = f"{__name__}.{_PLACES[name]}".partition(":")
    if module not in sys.modules:
        _import(module)
    return getattr(importlib.import_module(module), place)


def _import(module: str) -> None:
    from ddp_hydra.console.signals import held_back

    try:
        with held_back():
            importlib.import_module(module)
    except KeyboardInterrupt:
        from ddp_hydra.errors import Interrupted

        raise Interrupted("interrupted: nothing has begun") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
