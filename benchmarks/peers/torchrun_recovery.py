"""By hand: a DDP training loop that saves a checkpoint every 10 steps and goes on from the last. Run by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import MLP, TracedSGD, Vectors


def main(folder: Path, step_s: float, steps: int) -> None:
    """Train up to a number of steps."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoint, draft = folder / "checkpoint.pt", folder / "checkpoint.part"
    data = Vectors(16384)
    model, step = MLP(data.num_classes), 0
    optimizer = TracedSGD(model.parameters(), 0.01, step_s, str(folder))
    if checkpoint.exists():
        content = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        step = content["step"]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    global_batch = 32 * world_size
    per_epoch = len(data) // global_batch
    while step < steps:
        epoch, index = divmod(step, per_epoch)
        if index == 0 or "order" not in locals():
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        start = index * global_batch + rank * 32
        x, y = data.__getitems__(order[start : start + 32].tolist())
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        step += 1
        if step % 10 == 0 and rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, draft)
            draft.replace(checkpoint)
    dist.destroy_process_group()
    os._exit(0)  # a thread of torch's aborts some regular exits, after all is done


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
