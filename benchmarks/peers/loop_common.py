"""Shares the model, the batches and the measurements among the loops: by hand, of Fabric and of Ray Train."""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import loop_photos
from benchmarks.workloads import Crops, Images, Windows

AHEAD = 4
"""Batches that threads make ahead for a GPU."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("lstm", "resnet18", "resnet50"), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--metrics", required=True)
    parser.add_argument("--endpoint", help="URL of the store with photos; without, data are in memory")
    parser.add_argument("--crops", type=int, metavar="SIDE", help="images of bytes and of this size, in memory")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    return parser.parse_args()


@dataclass
class Work:
    """Holds the model and the data of one rank.

    Args:
        model: lstm or resnet18.
        batch_size: per rank.
        steps: of the run.
        metrics: file that rank 0 writes.
        endpoint: URL of the store with photos; None for data in memory.
        rank: whose.
        world_size: number of ranks.
        crops: size of images of bytes; None for others.
        device: cpu or cuda.
        precision: fp32, bf16 or fp16, by autocast.
        compile: the model.
    """

    model: str
    batch_size: int
    steps: int
    metrics: str
    endpoint: str | None
    rank: int
    world_size: int
    crops: int | None = None
    device: str = "cpu"
    precision: str = "fp32"
    compile: bool = False

    @property
    def backend(self) -> str:
        """The process group's."""
        return "nccl" if self.device == "cuda" else "gloo"

    def autocast(self) -> torch.autocast:
        """Return the context of the forward pass."""
        kind = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device, kind, enabled=self.precision != "fp32")

    def scaler(self) -> torch.amp.GradScaler:
        """Return what scales the loss for fp16; else it does nothing."""
        return torch.amp.GradScaler(self.device, enabled=self.precision == "fp16")

    def build(self) -> tuple[nn.Module, Any]:
        """Make the model and its data."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        n_samples = self.steps * self.batch_size * self.world_size
        if self.model == "lstm":
            from models.char_lstm import CharLSTM

            data: Any = Windows(n_samples)
            return CharLSTM(data.num_classes), data
        from models import resnet

        if self.crops:
            data = Crops(n_samples, self.crops)
        else:
            data = loop_photos.photos(self.endpoint) if self.endpoint else Images(n_samples)
        classes = data.num_classes if self.crops else loop_photos.CLASSES
        model = getattr(resnet, self.model)(classes).to(self.device, memory_format=torch.channels_last)
        if self.compile:
            model.compile()
        return model, data

    def batches(self, data: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batches, in random order."""
        order = torch.randperm(len(data))
        starts = [(step * self.world_size + self.rank) * self.batch_size for step in range(self.steps)]
        mine = [order[start : start + self.batch_size] for start in starts]
        if self.endpoint:
            batches = loop_photos.load(data, [indices.tolist() for indices in mine])
        elif self.device == "cuda":
            batches = (data.prepare(batch) for batch in self.to_gpu(data, mine))
        else:
            batches = (data.prepare(picked(data, indices)) for indices in mine)
        for x, y in batches:
            yield (x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x), y

    def to_gpu(self, data: Any, mine: list[Tensor]) -> Iterator[list[Tensor]]:
        """Copy batches from pinned memory; the next ones are made in threads while the model computes."""
        pinned = lambda indices: [part.pin_memory() for part in picked(data, indices)]  # noqa: E731
        with ThreadPoolExecutor(AHEAD) as pool:
            coming = deque(pool.submit(pinned, indices) for indices in mine[:AHEAD])
            for number in range(len(mine)):
                batch = coming.popleft().result()
                coming.extend(pool.submit(pinned, indices) for indices in mine[number + AHEAD : number + AHEAD + 1])
                yield [part.to(self.device, non_blocking=True) for part in batch]


def picked(data: Any, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return a batch of data in memory, which may hold fewer samples than it has."""
    indices = indices % len(data.x)
    return data.x[indices], data.y[indices]


class Log:
    """Loss and accuracy every 10 steps, over all ranks; rank 0 writes lines as in a job's metrics.jsonl.

    Args:
        work: whose.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.step = work, 0
        self.sums = torch.zeros(3, device=work.device)
        self.file = open(work.metrics, "w", buffering=1) if work.rank == 0 else None  # noqa: PTH123, SIM115

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        """Count one step."""
        self.step += 1
        correct = (logits.argmax(-1) == y).sum()
        self.sums += torch.stack([loss.float() * y.numel(), correct, loss.new_full((), y.numel(), dtype=torch.float)])
        if self.step % 10 == 0:
            dist.all_reduce(self.sums)
            loss_sum, correct_sum, seen = self.sums.tolist()
            if self.file is not None:
                samples = self.step * self.work.batch_size * self.work.world_size
                line = {"time": time.time(), "step": self.step, "samples": samples}
                print(json.dumps(line | {"loss": loss_sum / seen, "accuracy": correct_sum / seen}), file=self.file)
            self.sums.zero_()


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())
