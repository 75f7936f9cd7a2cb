"""ResNet-50 on one GPU, compiled, in 16 bits: the loop by hand, Fabric, Ray Train, and what the card can do."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import commands, overhead, report
from benchmarks.gpu import card
from benchmarks.gpu.bench import Bench, Broken, last_line
from benchmarks.report import Absent, Figure, Line
from benchmarks.train import RAY
from ddp_hydra.rank.environment import ALLOCATOR
from ddp_hydra.training import profiler
from models import resnet

CLASSES = 1000
PEERS = {"by hand": "ddp_loop.py", "Lightning Fabric": "fabric_loop.py", "Ray Train": "ray_loop.py"}
"""Their scripts."""


@dataclass(frozen=True)
class Work:
    """Holds what is trained.

    Args:
        model: resnet50 or resnet18.
        side: of the images, pixels.
        batch_size: of the one rank.
        steps: of a run.
        skip: the first steps, which are not counted.
        compile: the model.
        matmul: rows and columns of the matrices that tell what the device can do.
    """

    model: str
    side: int
    batch_size: int
    steps: int
    skip: int
    compile: bool
    matmul: int

    @property
    def samples(self) -> int:
        """Samples of a run."""
        return self.steps * self.batch_size


SMALL = Work("resnet18", 32, 8, 20, 10, False, 512)


def large(memory_gib: float, most: int = 256) -> Work:
    """Return ResNet-50 with the batch that fits into a GPU: 100 MiB an image, and some to spare."""
    fitting = (size for size in (256, 128, 64) if size <= most and size * 0.12 < memory_gib)
    return Work("resnet50", 224, next(fitting, 32), 240, 60, True, 8192)


def memory(bench: Bench) -> Iterator[Line]:
    """Train with batches of 128 and of 256 bytes in memory, by a loop by hand without DDP and by a job in turn."""
    works = [large(bench.card.memory_gib, most) for most in (128, 256)] if bench.on_gpu else [SMALL]
    for work in dict.fromkeys(works):
        yield from in_turn(bench, work, {"by hand": PEERS["by hand"]})


def speed(bench: Bench) -> Iterator[Line]:
    """Train by each side in turn, on one card, with images of bytes in memory."""
    yield from in_turn(bench, large(bench.card.memory_gib) if bench.on_gpu else SMALL, PEERS)


def in_turn(bench: Bench, work: Work, peers: Mapping[str, str]) -> Iterator[Line]:
    """Train by this project and by peers, and compare their speeds.

    Args:
        bench: runs the jobs.
        work: what is trained.
        peers: name -> script.
    """
    name = f"{work.model} at {work.side}, batch {work.batch_size}, {bench.half}"
    sides = {"ddp_hydra": "", **peers}
    absent = {side: why for side in sides if (why := missing(side))}
    speeds: dict[str, list[float]] = {side: [] for side in sides if side not in absent}
    broken: dict[str, str] = {}
    for turn in range(bench.repeats):
        for side in list(speeds)[:: -1 if turn % 2 else 1]:
            if side in broken:
                continue
            try:
                speeds[side].append(by_peer(bench, work, sides[side]) if sides[side] else ours(bench, work))
            except Broken as error:
                if side == "ddp_hydra":
                    raise
                broken[side] = str(error)
    mine = report.speeds(f"{name}, ddp_hydra", speeds["ddp_hydra"])
    yield mine
    if peers is PEERS:
        yield from roof(bench, work, mine)
    for side in list(sides)[1:]:
        if why := absent.get(side) or broken.get(side):
            yield Absent(f"{name}, {side}", why, failed=side in broken)
            continue
        yield report.speeds(f"{name}, {side}", speeds[side])
        goal = bench.goal(0.98 if side == "by hand" else 1.0)
        yield report.paired(f"ddp_hydra / {side}", speeds["ddp_hydra"], speeds[side], goal)


def missing(side: str) -> str:
    """Return what to install for a side; "" if it is there."""
    there = lambda *names: any(importlib.util.find_spec(name) for name in names)  # noqa: E731
    if side == "Lightning Fabric" and not there("lightning_fabric", "lightning"):
        return "needs Lightning Fabric: pip install lightning-fabric"
    if side == "Ray Train" and not (there("ray") and there("pyarrow")):
        return "needs Ray Train: pip install 'ray[train]'"
    return ""


def ours(bench: Bench, work: Work) -> float:
    """Samples/s of a job, with all its writers."""
    data = ("data=bench", "data.train._target_=benchmarks.workloads.Crops", f"+data.train.side={work.side}")
    sizes = (f"data.train.n_samples={work.samples}", f"data.batch_size={work.batch_size}", f"model={work.model}")
    length = (f"trainer.max_steps={work.steps}", "trainer.epochs=null", "trainer.log_every_steps=10")
    arithmetic = (f"trainer.precision={bench.half}", "trainer.channels_last=true", "trainer.threads=1")
    compiled = ("trainer.compile=default",) if work.compile else ()
    bare = ("optimizer.lr=0.01", "optimizer.nesterov=false", "optimizer.weight_decay=0", "scheduler=none")
    job = bench.job("speed", *data, *sizes, *length, *arithmetic, *compiled, *bare, *bench.ranks(1))
    report.progress(f"{work.model}, ddp_hydra: {job.speed(work.skip):,.1f} samples/s")
    return job.speed(work.skip)


def by_peer(bench: Bench, work: Work, script: str) -> float:
    """Samples/s of a script of `benchmarks/peers/`.

    Raises:
        Broken: it failed.
    """
    folder = bench.new_folder("peer")
    folder.mkdir()
    sizes = (
        f"--model={work.model}",
        f"--batch-size={work.batch_size}",
        f"--steps={work.steps}",
        f"--crops={work.side}",
    )
    arithmetic = (f"--device={bench.device}", f"--precision={bench.half}", *(["--compile"] if work.compile else []))
    arguments = (*sizes, *arithmetic, f"--metrics={folder / 'metrics.jsonl'}")
    if script == "ray_loop.py":
        command = [sys.executable, str(commands.ROOT / "benchmarks" / "peers" / script), *arguments]
    else:
        command = commands.by_hand(script, *arguments, ranks=1)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    variables = {**commands.ONE_THREAD, **ALLOCATOR, **RAY, "CUDA_VISIBLE_DEVICES": first if bench.on_gpu else ""}
    done = bench.command(command, folder, variables)
    if done.returncode:
        raise Broken(f"{script} ended with code {done.returncode}: {last_line(done.output)}")
    found = overhead.speed(folder / "metrics.jsonl", work.skip)
    report.progress(f"{work.model}, {script}: {found:,.1f} samples/s")
    return found


def roof(bench: Bench, work: Work, mine: Figure) -> Iterator[Figure]:
    """Compare what a training computes with the matrix products that the device has just done."""
    seconds = 6.0 if bench.on_gpu else 1.0
    settings = ("--device", bench.device, "--matmul", bench.half, "--size", str(work.matmul), "--seconds", str(seconds))
    peak = float(card.child(*settings)["tflops"])
    yield report.value(f"matrix products of {work.matmul}, {bench.half}", peak, unit="TFLOP/s")
    reached = profiler.TRAINING * operations(work) * mine.median / 1e12
    yield report.value(f"{work.model}: operations of the training", reached, unit="TFLOP/s")
    yield report.value("share of the roof", reached / peak, unit="x")


def operations(work: Work) -> int:
    """Return the operations of a forward pass for one image, counted without computing it."""
    with torch.device("meta"):
        model = getattr(resnet, work.model)(CLASSES)
        image = torch.empty(1, 3, work.side, work.side)
        with FlopCounterMode(display=False) as counter:
            model(image)
    return counter.get_total_flops()
