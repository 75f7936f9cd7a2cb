"""By hand, in DDP: a dict batch of 20 tensors; a GAN; an LSTM of whose tokens some count. Run by torchrun."""

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

from benchmarks.workloads import Fields, FieldsModel, PaddedWindows, Pictures
from models.char_lstm import CharLSTM
from models.gan import GAN

IGNORED = -100
"""The token that the loss of torch leaves out."""


class Log:
    """Means every 10 steps, over all ranks; rank 0 writes lines as in a job's metrics.jsonl.

    Args:
        path: of the file.
        global_batch: samples of all ranks in a step.
        names: of the means.
        counted: the values are sums, and the last is the number of things that they are of; otherwise they are means.
    """

    def __init__(self, path: str, global_batch: int, *names: str, counted: bool = False) -> None:
        self.names, self.global_batch, self.counted, self.step = names, global_batch, counted, 0
        self.sums = torch.zeros(len(names), dtype=torch.float64)
        self.file = Path(path).open("w", buffering=1) if dist.get_rank() == 0 else None  # noqa: SIM115

    @torch.no_grad()
    def add(self, *values: Tensor) -> None:
        """Count one step."""
        self.step += 1
        self.sums += torch.stack([value.double() for value in values])
        if self.step % 10 == 0:
            dist.all_reduce(self.sums)
            means = (self.sums / (self.sums[-1] if self.counted else 10 * dist.get_world_size())).tolist()
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


def lstm(steps: int, size: int, log: Log) -> None:
    """Train on the mean over the tokens that count, of all ranks; their number travels during the forward pass."""
    data = PaddedWindows(steps * size * dist.get_world_size())
    ddp = DistributedDataParallel(CharLSTM(data.num_classes), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9, fused=True)
    for indices in batches(len(data), steps, size):
        x, y = data.prepare((data.x[indices], data.y[indices]))
        n = (y != IGNORED).sum()
        n_of_all = n.clone()
        arrival = dist.all_reduce(n_of_all, async_op=True)
        logits = ddp(x)
        total = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")
        arrival.wait()
        optimizer.zero_grad()
        (total * (dist.get_world_size() / n_of_all)).backward()
        optimizer.step()
        log.add(total.detach(), (logits.argmax(-1) == y).sum(), n)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("fields", "gan", "lstm"), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--metrics", required=True)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = {
        "fields": ("loss",),
        "gan": ("discriminator", "generator", "accuracy"),
        "lstm": ("loss", "accuracy", "tokens"),
    }[given.model]
    log = Log(given.metrics, given.batch_size * dist.get_world_size(), *names, counted=given.model == "lstm")
    {"fields": fields, "gan": gan, "lstm": lstm}[given.model](given.steps, given.batch_size, log)
    dist.destroy_process_group()
    os._exit(0)  # a thread of torch's aborts some regular exits, after all is done


if __name__ == "__main__":
    main()
