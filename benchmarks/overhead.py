"""Training speed of a whole job, through Dask and with all writers on, against the loop written by hand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import commands, report
from benchmarks.report import Figure, Goal

RANKS = 2
SGD = ("optimizer.lr=0.01", "optimizer.nesterov=false", "optimizer.weight_decay=0")


@dataclass(frozen=True)
class Work:
    """Describes a workload.

    Args:
        model: config of the model, and its name for the script by hand.
        data: class of the data set.
        batch_size: per rank.
        steps: of a run.
        skip: the first steps, which are not counted.
        options: further overrides.
        script: the loop by hand.
        what: for its name in the table, where another work has the same model.
    """

    model: str
    data: str
    batch_size: int
    steps: int
    skip: int
    options: tuple[str, ...] = SGD
    script: str = "ddp_loop.py"
    what: str = ""

    @property
    def name(self) -> str:
        """Return its name in the table."""
        return f"{self.model}{self.what} x {self.batch_size}"


LARGE_GAN = ("model.size=16", "model.noise=64", "model.width=1024")
WORK = (
    Work("lstm", "Windows", 64, 600, 100),
    Work("resnet18", "Images", 32, 120, 20),
    Work(
        "fields", "Fields", 64, 1500, 200, ("task=model_loss", "optimizer=adam", "optimizer.lr=0.001"), "tasks_loop.py"
    ),
    Work(
        "lstm",
        "PaddedWindows",
        64,
        600,
        100,
        ("task=language_model", *SGD),
        "tasks_loop.py",
        " on counted tokens",
    ),
    Work("gan", "Pictures", 64, 300, 50, ("task=adversarial", "optimizer=gan_adam", *LARGE_GAN), "tasks_loop.py"),
)
"""The last three: a dict batch of 20 tensors, steps that count a varying number of tokens, steps of two updates."""


def measure(repeats: int) -> Iterator[Figure]:
    """Train by ddp_hydra and by hand in turn."""
    for work in WORK:
        ours, theirs = [], []
        for turn in range(repeats):
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                sides = ((ours, job), (theirs, by_hand))
                for speeds, side in sides if turn % 2 == 0 else reversed(sides):
                    speeds.append(side(work, Path(folder)))
            report.progress(f"{work.name}: ddp_hydra {ours[-1]:,.0f} samples/s, by hand {theirs[-1]:,.0f}")
        hand = report.speeds(f"{work.name}, by hand", theirs)
        whole = report.speeds(f"{work.name}, ddp_hydra", ours)
        yield from (hand, whole)
        yield report.paired(f"{work.name}, ddp_hydra / by hand", ours, theirs, Goal(0.97))


def in_memory(work: Work) -> tuple[str, ...]:
    """Overrides that choose the data set."""
    n_samples = work.steps * work.batch_size * RANKS
    target = f"benchmarks.workloads.{work.data}"
    return "data=bench", f"data.train._target_={target}", f"data.train.n_samples={n_samples}"


def job(work: Work, folder: Path, data: tuple[str, ...] = ()) -> float:
    """Samples/s of `python -m ddp_hydra`.

    Args:
        work: what to train.
        folder: for the run directory.
        data: overrides that choose other data than those in memory.
    """
    commands.ddp_hydra(
        f"cluster.n_workers={RANKS}",
        *(data or in_memory(work)),
        f"data.batch_size={work.batch_size}",
        f"model={work.model}",
        *work.options,
        "scheduler=none",
        f"trainer.max_steps={work.steps}",
        "trainer.threads=1",
        "trainer.log_every_steps=10",
        f"objective.metric={'train/generator/loss' if work.model == 'gan' else 'train/loss'}",
        "objective.direction=minimize",
        run_dir=folder / "run",
    )
    return speed(folder / "run" / "metrics.jsonl", work.skip)


def by_hand(work: Work, folder: Path) -> float:
    """Samples/s of the script."""
    metrics = folder / "by_hand.jsonl"
    sizes = (f"--batch-size={work.batch_size}", f"--steps={work.steps}")
    commands.torchrun(work.script, f"--model={work.model}", *sizes, f"--metrics={metrics}", ranks=RANKS)
    return speed(metrics, work.skip)


def speed(metrics: Path, skip: int) -> float:
    """Samples/s between the first line after `skip` steps and the last."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    first, last = next(line for line in lines if line["step"] >= skip), lines[-1]
    return (last["samples"] - first["samples"]) / (last["time"] - first["time"])


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=5)
