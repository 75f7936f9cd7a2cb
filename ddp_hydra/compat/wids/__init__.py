"""wids' classes: `from ddp_hydra.compat import wids`. `python -m ddp_hydra.compat.wids` has its index commands."""

from ddp_hydra.compat.wids.dataset import (
    ShardListDataset,
    create_cleanup_background_process,
    keep_most_recent_files,
)
from ddp_hydra.compat.wids.samplers import ChunkedSampler, DistributedChunkedSampler, ShardedSampler

__all__ = [
    "ChunkedSampler",
    "DistributedChunkedSampler",
    "ShardListDataset",
    "ShardedSampler",
    "create_cleanup_background_process",
    "keep_most_recent_files",
]
