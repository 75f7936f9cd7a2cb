"""By hand: DDP training loops for a dict batch of 20 tensors, and for a GAN. Run by torchrun."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import Fields, FieldsModel, Pictures
from models.gan import GAN


class Log:
    """Means every 10 steps, over all ranks; rank 0 writes lines like those of a job's metrics.jsonl.

    Args:
        path: of the file.
        global_batch: samples of all ranks in a step.
        names: of the means.
    """

    def __init__(self, path: str, global_batch: int, *names: str) -> None:
        self.names, self.global_batch, self.step = names, global_batch, 0
        self.sums = torch.zeros(len(names), dtype=torch.float64)
        self.file = Path(path).open("w", buffering=1) if dist.get_rank() == 0 else None  # noqa: SIM115

    @torch.no_grad()
    def add(self, *values: Tensor) -> None:
        """Count one step."""
        self.step += 1
        self.sums += torch.stack([value.double() for value in values])
        if self.step % 10 == 0:
            dist.all_reduce(self.sums)
            means = (self.sums / 10 / dist.get_world_size()).tolist()
            if self.file is not None:
                line = {"time": time.time(), "step": self.step, "samples": self.step * self.global_batch}
                print(json.dumps(line | dict(zip(self.names, means, strict=True))), file=self.file)
            self.sums.zero_()


def batches(n: int, steps: int, size: int) -> Iterator[Tensor]:
    """Yield this rank's indices of each step, in random order."""
    order = torch.randperm(n)
    for step in range(steps):
        start = (step * dist.get_world_size() + dist.get_rank()) * size
        yield order[start : start + size]


def fields(steps: int, size: int, log: Log) -> None:
    """Train on dicts."""
    data = Fields(steps * size * dist.get_world_size())
    ddp = DistributedDataParallel(FieldsModel(10), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.001, fused=True)
    for indices in batches(len(data), steps, size):
        loss = ddp(**data.batch(indices))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.add(loss.detach())


def gan(steps: int, size: int, log: Log) -> None:
    """Train a generator and a discriminator."""
    data = Pictures(steps * size * dist.get_world_size())
    model = GAN(16, 64, 1024)
    generator = DistributedDataParallel(model.generator, gradient_as_bucket_view=True)
    discriminator = DistributedDataParallel(model.discriminator, gradient_as_bucket_view=True)
    optimizers = [
        torch.optim.Adam(part.parameters(), lr=lr, betas=(0.5, 0.999), fused=True)
        for part, lr in ((generator, 0.001), (discriminator, 0.0005))
    ]
    for indices in batches(len(data), steps, size):
        real = data.x[indices]
        with torch.no_grad():
            made = model.generator(torch.randn(len(real), 64))
        # One call of DDP for both: a second call before the backward pass is not supported.
        on_real, on_made = discriminator(torch.cat([real, made])).chunk(2)
        loss = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        loss = loss + F.binary_cross_entropy_with_logits(on_made, torch.zeros_like(on_made))
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        right = ((on_real > 0).sum() + (on_made < 0).sum()) / (2 * len(real))

        for parameter in model.discriminator.parameters():
            parameter.requires_grad_(False)
        opinion = model.discriminator(generator(torch.randn(len(real), 64)))
        deceived = F.binary_cross_entropy_with_logits(opinion, torch.ones_like(opinion))
        optimizers[0].zero_grad()
        deceived.backward()
        optimizers[0].step()
        for parameter in model.discriminator.parameters():
            parameter.requires_grad_(True)
        log.add(loss.detach(), deceived.detach(), right)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("fields", "gan"), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--metrics", required=True)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = ("loss",) if given.model == "fields" else ("discriminator", "generator", "accuracy")
    log = Log(given.metrics, given.batch_size * dist.get_world_size(), *names)
    {"fields": fields, "gan": gan}[given.model](given.steps, given.batch_size, log)
    dist.destroy_process_group()
    os._exit(0)  # a thread of torch's aborts some regular exits, after all is done


if __name__ == "__main__":
    main()
