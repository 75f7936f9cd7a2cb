"""What records cost a step, in microseconds: metrics, progress, TensorBoard, checkpoints. A tiny model's steps."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import commands, report
from benchmarks.report import Figure

STEPS = 3_000
BIG_STEPS = 40
ALL = ("progress", "tensorboard")
JOB = (
    *("cluster.n_workers=2", "data=bench", "data.batch_size=4", "scheduler=none", "trainer.threads=1"),
    *("objective.metric=train/loss", "objective.direction=minimize", "trainer.validate_every_epochs=0"),
)


@dataclass(frozen=True)
class Variant:
    """A way to run the job.

    Args:
        name: what there is more than in the one before.
        every: steps from one record to the next.
        without: writers that are left out.
        overrides: more of them.
        steps: of the run.
    """

    name: str
    every: int
    without: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ("model=mlp", f"data.train.n_samples={8 * STEPS}")
    steps: int = STEPS


RESNET = ("model=resnet18", "data.train._target_=benchmarks.workloads.Images", f"data.train.n_samples={8 * BIG_STEPS}")
NOTHING = Variant("a step without records", STEPS, ALL)
METRICS = Variant("metrics", 1, ALL)
PROGRESS = Variant("progress", 1, ("tensorboard",))
TENSORBOARD = Variant("TensorBoard", 1)
DEFAULT = Variant("all of them, a record every 10 steps", 10)
SAVING = Variant("a checkpoint every 100 steps", 10, (), (*DEFAULT.overrides, "trainer.checkpoint_every_steps=100"))
BIG = Variant("ResNet-18", 10, (), RESNET, BIG_STEPS)
BIG_SAVING = Variant("ResNet-18, saving", 10, (), (*RESNET, "trainer.checkpoint_every_steps=10"), BIG_STEPS)


def measure(repeats: int) -> Iterator[Figure]:
    """Run all variants in turn; each record's price is a difference."""
    variants = (NOTHING, METRICS, PROGRESS, TENSORBOARD, DEFAULT, SAVING, BIG, BIG_SAVING)
    runs: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for turn in range(repeats):
        for variant in variants[:: -1 if turn % 2 else 1]:
            runs[variant].append(step_us(variant))
            report.progress(f"{variant.name}: {runs[variant][-1]:,.0f} us a step")
    found = {variant: report.times(variant.name, times, unit="us") for variant, times in runs.items()}
    yield found[NOTHING]
    yield more("metrics in each step, to metrics.jsonl", found[METRICS], found[NOTHING])
    yield more("progress in each step", found[PROGRESS], found[METRICS])
    yield more("TensorBoard in each step", found[TENSORBOARD], found[PROGRESS])
    yield more("all three, a record every 10 steps (default)", found[DEFAULT], found[NOTHING])
    yield more("a checkpoint of the tiny model every 100 steps", found[SAVING], found[DEFAULT])
    yield found[BIG]
    yield more("a checkpoint of ResNet-18 (85 MiB) every 10 steps", found[BIG_SAVING], found[BIG])


def more(name: str, over: Figure, under: Figure) -> Figure:
    """What one variant takes more than another."""
    return Figure(name, over.median - under.median, over.best - under.best, over.worst - under.worst, "us")


def step_us(variant: Variant) -> float:
    """Microseconds a step of a whole run."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, commands.nobody_warm() as variables:
        run_dir = Path(folder) / "run"
        steps = (f"trainer.max_steps={variant.steps}", f"trainer.log_every_steps={variant.every}")
        _, _, module, *words = commands.job(*JOB, *variant.overrides, *steps, run_dir=run_dir)
        assert module == "ddp_hydra"
        commands.run([sys.executable, "-m", "benchmarks.some_writers", *variant.without, "--", *words], variables)
        summary = json.loads((run_dir / "summary.json").read_text())
        return 1e6 * summary["train_s"] / summary["steps"]


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=3)
