"""By hand: as little as a DDP script needs for its first step. Run by torchrun."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import MLP, StampedSGD, Vectors


def main(stamp: str) -> None:
    """Do one step; rank 0 writes the time at which it was done to the file `stamp`."""
    dist.init_process_group("gloo")
    data = Vectors(1024)
    model = DistributedDataParallel(MLP(data.num_classes))
    optimizer = StampedSGD(model.parameters(), 0.01, stamp)
    x, y = data.__getitems__(list(range(dist.get_rank(), 32 * dist.get_world_size(), dist.get_world_size())))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    dist.destroy_process_group()
    os._exit(0)  # a thread of torch's aborts some regular exits, after all is done


if __name__ == "__main__":
    main(sys.argv[1])
