"""What records cost, in microseconds: metrics, progress, TensorBoard, checkpoints. A tiny model's steps.

What a rank pays is found within one run, between steps with and without a record; what the client pays, in CPU time.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import timeit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import commands, report
from benchmarks.report import Figure
from ddp_hydra.metrics import Meter, count

STEPS = 3_000
WARM_STEPS = 200
DEFAULT_EVERY = 10
ALL = ("progress", "tensorboard")
JOB = (
    *("cluster.n_workers=2", "data=bench", "data.batch_size=4", "scheduler=none", "trainer.threads=1"),
    *("objective.metric=train/loss", "objective.direction=minimize", "trainer.validate_every_epochs=0"),
    *("optimizer=traced_sgd", "optimizer.step_s=0"),
)
MLP = ("model=mlp", f"data.train.n_samples={8 * STEPS}")
RESNET = ("model=resnet18", "data.train._target_=benchmarks.workloads.Images", f"data.train.n_samples={8 * STEPS}")


@dataclass(frozen=True)
class Ran:
    """What a run has cost.

    Args:
        step_us: time from the end of a step to that of the next one, by the step before it, 1 first.
        client_s: CPU time of the command.
    """

    step_us: list[float]
    client_s: float

    def after(self, every: int, offset: int = 0) -> list[float]:
        """Times of the steps after each n-th one, without the first steps."""
        return [us for step, us in enumerate(self.step_us, 1) if step % every == offset and step > WARM_STEPS]


def measure(repeats: int) -> Iterator[Figure]:
    """Run all variants in turn."""
    found: dict[str, list[float]] = {}
    for turn in range(repeats):
        for name, us in once().items():
            found.setdefault(name, []).append(us)
            report.progress(f"{turn + 1} of {repeats}, {name}: {us:,.0f} us")
    for name, runs in found.items():
        yield report.times(name, runs, unit="us")


def once() -> dict[str, float]:
    """All prices, in microseconds."""
    paired, rare = run(ALL, every=2), run(ALL, every=STEPS)
    step = statistics.median(paired.after(2, 1))
    record = statistics.median(paired.after(2)) - step
    counted = counting()
    client = {without: run(without, every=1).client_s for without in (ALL, ("tensorboard",), ())}
    per_record = {without: (spent - rare.client_s) / STEPS * 1e6 for without, spent in client.items()}
    saving = run((), DEFAULT_EVERY, "trainer.checkpoint_every_steps=100")
    large = run((), DEFAULT_EVERY, "trainer.checkpoint_every_steps=50", model=RESNET, steps=500)
    return {
        "a step of the tiny model": step,
        "rank: count loss and accuracy, in each step": counted,
        "rank: a record": record,
        "rank: both, a record every 10 steps, per step": counted + record / DEFAULT_EVERY,
        "client CPU: a record arrives, metrics.jsonl": per_record[ALL],
        "client CPU: progress": per_record[("tensorboard",)] - per_record[ALL],
        "client CPU: TensorBoard": per_record[()] - per_record[("tensorboard",)],
        "client CPU: all, a record every 10 steps, per step": per_record[()] / DEFAULT_EVERY,
        "a checkpoint of the tiny model: its step waits": waits(saving, 100),
        "... all ranks lose until the next one": loses(saving, 100),
        "a step of ResNet-18": statistics.median(large.step_us),
        "a checkpoint of it (85 MiB): its step waits": waits(large, 50),
        "... all ranks lose, on shared cores": loses(large, 50),
    }


def waits(ran: Ran, every: int) -> float:
    """How much longer the steps with a checkpoint are than others with a record."""
    return statistics.median(ran.after(every)) - statistics.median(ran.after(every, every // 2))


def loses(ran: Ran, every: int) -> float:
    """How much longer the first half of the steps after a checkpoint is than the second, in the median."""
    half = every // 2
    saved = range(every * (WARM_STEPS // every + 1), len(ran.step_us) - every, every)
    halves = [(total(ran.step_us, step, half), total(ran.step_us, step + half, half)) for step in saved]
    return statistics.median(first - second for first, second in halves)


def total(step_us: Sequence[float], step: int, n_steps: int) -> float:
    """Time of some steps."""
    return sum(step_us[step - 1 : step - 1 + n_steps])


def counting() -> float:
    """Microseconds for what the loop does with the metrics of each batch of 64."""
    torch.set_num_threads(1)
    meter, loss, logits, target = Meter(torch.device("cpu")), torch.rand(()), torch.rand(64, 10), torch.zeros(64).long()
    runs = timeit.repeat(lambda: meter.add(count(loss, logits, target)), number=1_000, repeat=5)
    return statistics.median(runs) * 1_000


def run(without: tuple[str, ...], every: int, *overrides: str, model: tuple[str, ...] = MLP, steps: int = STEPS) -> Ran:
    """Run a job with a record every so many steps, without some writers."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, commands.nobody_warm() as variables:
        folder = Path(name)
        lengths = (f"trainer.max_steps={steps}", f"trainer.log_every_steps={every}", f"optimizer.folder={folder}")
        _, _, module, *words = commands.job(*JOB, *model, *lengths, *overrides, run_dir=folder / "run")
        assert module == "ddp_hydra"
        command = [sys.executable, "-m", "benchmarks.some_writers", str(folder / "cpu_s"), *without, "--", *words]
        commands.run(command, variables)
        times = [1e6 * float(line.split()[0]) for line in (folder / "steps").read_text().splitlines()]
        return Ran([b - a for a, b in itertools.pairwise(times)], float((folder / "cpu_s").read_text()))


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=3)
