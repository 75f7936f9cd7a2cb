"""By hand: a short DDP training with the loss every 10 steps and a checkpoint at the end. Run by torchrun."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import MLP, StampedSGD, Vectors


def main() -> None:
    """Train; rank 0 writes the lines, the checkpoint, and how long it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = Vectors(args.samples)
    model = MLP(data.num_classes)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if rank == 0:
        args.folder.mkdir(parents=True)
    optimizer = StampedSGD(ddp.parameters(), args.lr, str(args.folder / "first-step"))
    order = torch.randperm(len(data))
    begin = time.perf_counter()

    lines = []
    for step in range(1, args.steps + 1):
        start = ((step - 1) * world_size + rank) * args.batch_size
        x, y = data.__getitems__(order[start : start + args.batch_size].tolist())
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            mean = loss.detach() / world_size
            dist.all_reduce(mean)
            lines.append(json.dumps({"step": step, "loss": mean.item()}))
    if rank == 0:
        (args.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.folder / "last.pt")
        (args.folder / "summary.json").write_text(json.dumps({"train_s": time.perf_counter() - begin}))
    dist.destroy_process_group()
    os._exit(0)  # a thread of torch's aborts some regular exits, after all is done


if __name__ == "__main__":
    main()
