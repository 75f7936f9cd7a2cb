"""Imports the modules that ranks need into the fork server, as long as somebody waits for it."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.metadata import entry_points
from typing import Any

from ddp_hydra.rank import garbage, lazy_dynamo

PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torchvision", "numpy.random",
    "omegaconf", "hydra.utils", "PIL.Image", "ddp_hydra.rank.process", "ddp_hydra.training.loop",
    "ddp_hydra.tasks.losses", "torch.utils.serialization",
)  # fmt: skip
"""Modules that nearly every rank imports; those that are not installed are skipped."""
BACKENDS = ("gloo", "nccl")
LOOK_S = 0.05
"""Seconds between two looks at the callers."""


def preload(look: Callable[[], object]) -> None:
    """Import modules that ranks need, so that a fork has them at once."""
    watcher = _Watcher(look)
    garbage.pause()
    sys.meta_path.insert(0, watcher)
    try:
        for name in PRELOAD:
            with contextlib.suppress(Exception):  # a rank that needs the module reports the error
                importlib.import_module(name)
                if name == "torch":
                    lazy_dynamo.put_off()
        register_backends()
    finally:
        sys.meta_path.remove(watcher)
    garbage.resume()


def register_backends() -> None:
    """Register the backends of process groups with torch, as each rank would have to do otherwise.

    Since 2.14, torch finds even its own ones in the metadata of all installed packages.
    """
    for found in entry_points(group="torch.distributed.backends"):
        if found.name in BACKENDS:
            with contextlib.suppress(Exception):  # a rank that needs the backend reports the error
                found.load()()


class _Watcher(MetaPathFinder):
    """Finds no module, but is asked for each one before it is imported: about 2,000 times."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.look, self.looked_at = look, time.monotonic()

    def find_spec(self, *_: Any) -> None:
        if time.monotonic() - self.looked_at > LOOK_S:
            self.look()
            self.looked_at = time.monotonic()
