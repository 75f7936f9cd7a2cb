"""Several ranks: DataParallel, SyncBatchNorm, frozen layers, and hooks that send fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import report
from benchmarks.gpu.bench import SHORT, Bench, relative
from benchmarks.report import Figure, Goal

NONE = Goal(0, at_most=True)
CLOSE = Goal(0.001, at_most=True)
LENGTH = ("trainer.max_steps=20", "trainer.epochs=null", "data.val=null")
BARE = ("optimizer.lr=0.01", "optimizer.nesterov=false", "optimizer.weight_decay=0", "scheduler=none")
SLOW = ("optimizer.lr=0.0003",)
"""Rounding alone moves the losses of eight steps by 0.1 at a rate of 0.01, by 0.005 at this one."""
MOST_IMAGES = 20_480
HOOKS = {
    "fp16": Goal(0.02, at_most=True),
    "bf16": Goal(0.05, at_most=True),
    "powersgd": Goal(0.5, at_most=True),
}
"""How far the loss may be from that with whole gradients, after 60 steps: as the bits that each one keeps."""


def images(bench: Bench, batch_size: int, steps: int, ranks: int = 1) -> tuple[str, ...]:
    """Return the overrides of ResNet-18 on images of 32x32 in memory: as many as all ranks see together."""
    samples = min(batch_size * steps * ranks, MOST_IMAGES)
    data = ("data=bench", "data.train._target_=benchmarks.workloads.Images", f"data.train.n_samples={samples}")
    often = ("trainer.log_every_steps=1", "trainer.checkpoint_every_epochs=0")
    length = (f"trainer.max_steps={steps}", "trainer.epochs=null", *often)
    return *data, f"data.batch_size={batch_size}", "model=resnet18", *BARE, *length


def data_parallel(bench: Bench) -> Iterator[Figure]:
    """Train on all GPUs by one rank with DataParallel, and by a rank on each with DDP."""
    gpus = bench.card.gpus or 1
    sides = {"dp": ("parallel=dp", *bench.ranks(1)), "ddp": ("parallel=ddp", *bench.ranks(gpus))}
    shares = {"dp": gpus, "ddp": 1}  # one rank of DataParallel takes the batch of all
    losses = {
        name: bench.job(name, *SHORT, *LENGTH, f"data.batch_size={32 * shares[name]}", *side).every("train/loss")
        for name, side in sides.items()
    }
    name = f"DataParallel against DDP on {gpus}: largest difference of the loss"
    yield report.value(name, relative(losses["dp"], losses["ddp"]), CLOSE, "of it")
    size, steps = (128, 120) if bench.on_gpu else (4, 6)
    for name, side in sides.items():
        data = images(bench, size * shares[name], steps, ranks=gpus // shares[name])
        speed = bench.job(f"{name}-speed", *data, *side).speed(steps // 3)
        yield report.value(f"ResNet-18, 32x32, {name}", speed, unit="samples/s")


def sync_batchnorm(bench: Bench) -> Iterator[Figure]:
    """Train on two ranks with SyncBatchNorm: the losses equal one rank's with the whole batch."""
    steps = 8
    one = bench.job("whole-batch", *images(bench, 32, steps), *SLOW, *bench.ranks(1)).every("train/loss")
    for name, synced in (("SyncBatchNorm", "true"), ("BatchNorm of each rank", "false")):
        settings = (f"parallel.sync_batchnorm={synced}", *SLOW, *bench.ranks(2))
        two = bench.job("two-ranks", *images(bench, 16, steps, ranks=2), *settings).every("train/loss")
        goal = Goal(0.01, at_most=True) if synced == "true" else None
        title = f"{name}, two ranks by {bench.backend} against one: largest difference of the loss"
        yield report.value(title, relative(two, one), goal, "of it")


def freeze(bench: Bench) -> Iterator[Figure]:
    """Train the last layer only, on GPUs with SyncBatchNorm: all others stay as they are, bit for bit."""
    sync = ("parallel.sync_batchnorm=true",) if bench.on_gpu else ()
    frozen = ("trainer.freeze=['*','!fc.*']", "trainer.checkpoint_every_steps=1", "results.keep_checkpoints=null")
    job = bench.job("freeze", *images(bench, 8, 4, ranks=2), *frozen, *sync, *bench.ranks(2))
    before, after = (job.checkpoint(name)["model"] for name in ("step-000001.pt", "last.pt"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    yield report.value("frozen tensors that changed", len(changed - {"fc.weight", "fc.bias"}), NONE)
    yield report.value("tensors of the last layer that changed", len(changed & {"fc.weight", "fc.bias"}), Goal(2))


def hooks(bench: Bench) -> Iterator[Figure]:
    """Send gradients as fp16, bf16 and products of thin matrices, between two ranks."""
    length = ("trainer.max_steps=60", "trainer.epochs=null", "data.val=null", "optimizer.lr=0.1", *bench.ranks(2))
    whole = bench.job("whole-gradients", *SHORT, *length, "parallel.comm_hook=none").every("train/loss")
    for name, goal in HOOKS.items():
        settings = (f"parallel.comm_hook={name}", "parallel.start_step=5")
        found = bench.job(name, *SHORT, *length, *settings).every("train/loss")
        title = f"comm_hook={name} by {bench.backend}: difference of the mean loss to whole gradients"
        yield report.value(title, relative([sum(found)], [sum(whole)]), goal, "of it")
