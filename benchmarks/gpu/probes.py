"""Looks into a rank: a callback that counts CUDA graphs, and models that count synchronisations or ask for too much."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_hydra.training.callbacks import Callback
from models.mlp import MLP

SYNCHRONISES = "synchronizing CUDA operation"
"""What torch warns of in `set_sync_debug_mode`."""


class Graphs(Callback):
    """Writes down how many CUDA graphs were recorded, and how many compiled functions went without.

    Args:
        file: gets one JSON object.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_end(self, run: Any) -> None:
        """Write the file."""
        if run.rank == 0:
            self.file.write_text(json.dumps(counted(torch.device(run.device))))


def counted(device: torch.device) -> dict[str, int]:
    """Return what torch has counted in this process."""
    from torch._dynamo.utils import counters

    skips = int(counters["inductor"]["cudagraph_skips"])
    recorded = 0
    if device.type == "cuda":
        from torch._inductor.cudagraph_trees import get_container

        trees = get_container(device.index or 0).tree_manager
        recorded = 0 if trees is None else trees.new_graph_id().id
    return {"skips": skips, "recorded": recorded}


class Watched(MLP):
    """Counts what waits for the GPU in some of its steps, and writes the number down.

    Args:
        file: gets one JSON object.
        first: forward pass in which the count begins.
        steps: how many are counted.
        others: of `MLP`.
    """

    def __init__(self, file: str, first: int = 5, steps: int = 10, **others: Any) -> None:
        super().__init__(**others)
        self.file, self.first, self.steps = Path(file), first, steps
        self.calls, self.seen = 0, list[str]()
        self.show: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Compute; begin or end the count."""
        if self.training:
            self.calls += 1
            if self.calls == self.first:
                self._begin()
            elif self.calls == self.first + self.steps:
                self._end()
        return super().forward(x)

    def _begin(self) -> None:
        self.show = warnings.showwarning
        warnings.showwarning = self._hear
        warnings.filterwarnings("always", message=f".*{SYNCHRONISES}.*")
        torch.cuda.set_sync_debug_mode("warn")

    def _end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self.show
        self.file.write_text(json.dumps({"steps": self.steps, "where": self.seen}))

    def _hear(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        if SYNCHRONISES in str(message):
            self.seen.append(f"{Path(filename).name}:{lineno}")
        else:
            self.show(message, category, filename, lineno, *rest, **more)


class Huge(MLP):
    """Asks for 16 TiB in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Fail."""
        torch.empty(2**42, device=x.device)
        return super().forward(x)
