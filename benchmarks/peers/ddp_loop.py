"""By hand: a training loop with loss and accuracy every 10 steps, in DDP for several ranks. Run by torchrun."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.loop_common import Log, Work, arguments, loss_of


def main() -> None:
    """Train."""
    given = vars(arguments())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    work = Work(**given, rank=rank, world_size=world_size)
    if work.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(work.backend)
    model, data = work.build()
    # One rank has nothing to exchange: the wrapper would cut a compiled model into a graph for each bucket.
    trained = DistributedDataParallel(model, gradient_as_bucket_view=True) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    log, scaler = Log(work), work.scaler()
    for x, y in work.batches(data):
        with work.autocast():
            logits = trained(x)
            loss = loss_of(logits, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log.add(loss, logits, y)
    dist.destroy_process_group()
    os._exit(0)  # a thread of torch's aborts some regular exits, after all is done


if __name__ == "__main__":
    main()
