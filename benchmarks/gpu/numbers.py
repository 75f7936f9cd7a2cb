"""fp16 with its loss scale, a resume that is exact to the bit, and CUDA graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import torch

from benchmarks import report
from benchmarks.gpu.bench import SHORT, Bench, Job, differing, relative
from benchmarks.report import Figure, Goal

NONE = Goal(0, at_most=True)
LOW = (
    "trainer.precision=fp16", "trainer.ema_decay=0.9", "trainer.clip_norm=0.5", "optimizer=adamw", "optimizer.lr=0.01",
    "model.dropout=0.5",
)  # fmt: skip
"""All that keeps a state of its own: loss scale, average, a fused optimizer, dropout."""


def fp16(bench: Bench) -> Iterator[Figure]:
    """Let scaled gradients overflow, and a loss be NaN: the scale falls, the step is left out, training goes on."""
    loud = ("data=bench", "data.train._target_=benchmarks.workloads.LoudVectors", "model=mlp", "scheduler=none")
    faults = ("trainer.on_nonfinite=skip", "trainer.max_nonfinite=50", "faults=['nan,rank=0,step=12']")
    length = ("data.train.n_samples=1280", "trainer.max_steps=40", "trainer.epochs=null", "trainer.log_every_steps=1")
    job = bench.job("fp16", *loud, *LOW, *faults, *length, *bench.ranks(1))
    scales = job.every("loss_scale")
    falls = sum(later < earlier for earlier, later in pairwise([2.0**16, *scales]))
    yield report.value("fp16: overflows that lowered the loss scale", falls, Goal(1))
    bad = sum(not bool(value.isfinite().all()) for value in job.checkpoint()["model"].values())
    yield report.value("fp16: tensors of the checkpoint that are not finite", bad, NONE)
    yield report.value("fp16: steps of 40, an overflow and a NaN among them", int(job.summary["steps"]), Goal(40))


def resume(bench: Bench) -> Iterator[Figure]:
    """Stop a run in fp16 with a moving average and fused AdamW, go on, and compare every bit of what it saves."""
    length = ("trainer.max_steps=20", "trainer.epochs=null", "trainer.checkpoint_every_steps=8")
    kept = ("results.keep_checkpoints=null", *bench.ranks(2))
    whole = bench.job("whole", *SHORT, *LOW, *length, *kept)
    first = whole.dir / "checkpoints" / "step-000008.pt"
    resumed = bench.job("resumed", *SHORT, *LOW, *length, *kept, f"resume={first}")
    contents = [job.checkpoint() for job in (whole, resumed)]
    different = differing(*contents)
    name = "resumed in fp16, EMA, clip, AdamW: parts of the checkpoint that differ"
    yield report.value(name, len(different), NONE)
    state = sum(isinstance(value, torch.Tensor) for part in ("model", "ema") for value in tensors(contents[0], part))
    yield report.value("tensors of model and average that were compared", state, Goal(12))
    rest = [[line for line in losses(job) if line[0] > 8] for job in (whole, resumed)]
    yield report.value("losses after the resume that differ", sum(a != b for a, b in zip(*rest, strict=True)), NONE)


def losses(job: Job) -> list[tuple[int, float]]:
    """Return steps and losses of a job."""
    return [(line["step"], line["train/loss"]) for line in job.records if "train/loss" in line]


def tensors(content: dict, part: str) -> list:
    """Return the values of a part of a checkpoint, or of the model within it."""
    found = content.get(part) or {}
    return list(found.get("model", found).values()) if isinstance(found, dict) else []


def graphs(bench: Bench) -> Iterator[Figure]:
    """Compile with CUDA graphs, accumulate, and compare the losses with the losses of the model as it is."""
    length = ("trainer.max_steps=40", "trainer.epochs=null", "data.val=null", "trainer.gradient_accumulation_steps=2")
    told = bench.new_folder("graphs.json")
    watch = ("+callbacks.graphs._target_=benchmarks.gpu.probes.Graphs", f"+callbacks.graphs.file={told}")
    plain = bench.job("eager", *SHORT, *length, *bench.ranks(1))
    job = bench.job("graphs", *SHORT, *length, *watch, "trainer.compile=reduce_overhead", *bench.ranks(1))
    close = Goal(0.001, at_most=True)
    difference = relative(job.every("train/loss"), plain.every("train/loss"))
    yield report.value("CUDA graphs, against eager: largest difference of the loss", difference, close, "of it")
    found = json.loads(told.read_text())
    yield report.value("CUDA graphs: compiled functions that went without", found["skips"], NONE)
    yield report.value("CUDA graphs: recorded", found["recorded"], Goal(1))
    yield report.value("CUDA graphs / eager, samples/s", job.speed(20) / plain.speed(20), unit="x")
