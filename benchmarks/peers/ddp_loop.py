"""By hand: a DDP training loop with loss and accuracy every 10 steps. Run by torchrun."""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import Images, Windows


def main() -> None:
    """Train; rank 0 writes lines like those of a job's metrics.jsonl."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("lstm", "resnet18"), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--metrics", required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    global_batch = args.batch_size * world_size
    torch.manual_seed(0)

    if args.model == "lstm":
        from models.char_lstm import CharLSTM

        data = Windows(args.steps * global_batch)
        model = CharLSTM(data.num_classes)
    else:
        from models.resnet import resnet18

        data = Images(args.steps * global_batch)
        model = resnet18(data.num_classes).to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    order = torch.randperm(len(data))
    total_loss, correct, seen = torch.zeros(()), torch.zeros(()), 0

    with open(args.metrics, "w", buffering=1) as metrics:  # noqa: PTH123
        for step in range(1, args.steps + 1):
            start = (step - 1) * global_batch + rank * args.batch_size
            indices = order[start : start + args.batch_size]
            x, y = data.prepare((data.x[indices], data.y[indices]))
            if x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            logits = ddp(x)
            loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            with torch.no_grad():
                total_loss += loss * y.numel()
                correct += (logits.argmax(-1) == y).sum()
                seen += y.numel()
            if step % 10 == 0:
                sums = torch.stack([total_loss, correct, torch.tensor(float(seen))])
                dist.all_reduce(sums)
                if rank == 0:
                    line = {"time": time.time(), "step": step, "samples": step * global_batch}
                    line |= {"loss": (sums[0] / sums[2]).item(), "accuracy": (sums[1] / sums[2]).item()}
                    print(json.dumps(line), file=metrics)
                total_loss.zero_()
                correct.zero_()
                seen = 0
    dist.destroy_process_group()
    os._exit(0)  # a thread of torch's aborts some regular exits, after all is done


if __name__ == "__main__":
    main()
