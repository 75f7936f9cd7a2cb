"""A callback that says something on each rank, in each of the ways there are."""

from __future__ import annotations

import os
from typing import Any

from ddp_hydra import results
from ddp_hydra.training.callbacks import Callback

LARGE = 3 * results.INLINE_BYTES


class Reporter(Callback):
    """Reports from all ranks when the training starts."""

    def on_start(self, run: Any) -> None:
        """Print, warn, log and submit a small and a large file."""
        rank = int(os.environ["RANK"])
        print(f"printed by rank {rank}")
        results.warn(f"warning of rank {rank}")
        results.log({f"of_rank_{rank}": rank}, step=0)
        results.submit(f"said/small-{rank}.txt", str(rank))
        results.submit(f"said/large-{rank}.txt", str(rank) * LARGE)
