"""Run the loop of `ddp_loop.py` with Lightning Fabric, under torchrun."""

from __future__ import annotations

import os

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy

from benchmarks.peers.loop_common import Log, Work, arguments, loss_of


def main() -> None:
    """Train."""
    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    world_size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    work = Work(**vars(arguments()), rank=fabric.global_rank, world_size=world_size)
    bare, data = work.build()
    model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.01, momentum=0.9, fused=True))
    log = Log(work)
    for x, y in work.batches(data):
        logits = model(x)
        loss = loss_of(logits, y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        log.add(loss, logits, y)
    os._exit(0)


if __name__ == "__main__":
    main()
