"""Runs the loop of `ddp_loop.py` with Lightning Fabric, under torchrun."""

from __future__ import annotations

import os
from typing import Any

import torch

try:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy
except ModuleNotFoundError:  # the same, as a part of the package lightning
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

from benchmarks.peers.loop_common import Log, Work, arguments, loss_of

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def main() -> None:
    """Train."""
    world_size = int(os.environ["WORLD_SIZE"])
    work = Work(**vars(arguments()), rank=int(os.environ["RANK"]), world_size=world_size)
    strategy: Any = "auto"
    if world_size > 1:
        strategy = DDPStrategy(process_group_backend=work.backend, gradient_as_bucket_view=True)
    precision = PRECISIONS[work.precision]
    fabric = Fabric(accelerator=work.device, devices=world_size, strategy=strategy, precision=precision)
    fabric.launch()
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
