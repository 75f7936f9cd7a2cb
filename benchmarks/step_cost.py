"""Measures the cost of records in microseconds (metrics, progress, TensorBoard, checkpoints) with a tiny model.

What a rank pays is found within one run, between steps with and without a record; what the client pays, in CPU time.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import commands, report
from benchmarks.report import Figure
from ddp_hydra import results
from ddp_hydra.record import Metrics, Record
from ddp_hydra.tasks.classification import Classification
from ddp_hydra.training import checkpoint
from ddp_hydra.training.lr_schedules import constant
from ddp_hydra.training.metrics import Meter, count
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.state import Position, TrainingState
from ddp_hydra.writers.tensorboard import TensorBoardWriter
from models.resnet import resnet18

STEPS = 3_000
LARGE_STEPS, LARGE_EVERY = 300, 20
DEFAULT_EVERY = 10
ALL, ONE = ("progress", "tensorboard"), ("tensorboard",)
JOB = (
    *("cluster.n_workers=2", "data=bench", "data.batch_size=4", "scheduler=none", "trainer.threads=1"),
    *("objective.metric=train/loss", "objective.direction=minimize", "trainer.validate_every_epochs=0"),
    *("optimizer=traced_sgd", "optimizer.step_s=0"),
)
MLP = ("model=mlp", f"data.train.n_samples={8 * STEPS}")
RESNET = (
    *("model=resnet18", "data.train._target_=benchmarks.workloads.Images"),
    f"data.train.n_samples={8 * LARGE_STEPS}",
)


@dataclass(frozen=True)
class Ran:
    """Holds the costs of one run.

    Args:
        step_us: time from the end of a step to the end of the next one, by the step before it, 1 first.
        client_s: CPU time of the command.
    """

    step_us: list[float]
    client_s: float

    def after(self, every: int, offset: int = 0) -> float:
        """Median time of the steps after each n-th one, without the first tenth."""
        timed = enumerate(self.step_us, 1)
        return statistics.median(us for n, us in timed if n % every == offset and n > len(self.step_us) // 10)


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
    """Measure all costs, in microseconds."""
    paired, rare = run(ALL, every=2), run(ALL, every=STEPS)
    step = paired.after(2, 1)
    record = paired.after(2) - step
    counted = counting()
    arrival, progress = ((run(without, every=1).client_s - rare.client_s) / STEPS * 1e6 for without in (ALL, ONE))
    progress -= arrival
    events = writing_events()
    saving = run((), DEFAULT_EVERY, "trainer.checkpoint_every_steps=100")
    large = run((), DEFAULT_EVERY, model=RESNET, steps=LARGE_STEPS)
    large_saving = run(
        *((), DEFAULT_EVERY, f"trainer.checkpoint_every_steps={LARGE_EVERY}"), model=RESNET, steps=LARGE_STEPS
    )
    return {
        "a step of the tiny model": step,
        "rank: count loss and accuracy, in each step": counted,
        "rank: a record": record,
        "rank: both, a record every 10 steps, per step": counted + record / DEFAULT_EVERY,
        "client CPU: a record arrives, metrics.jsonl": arrival,
        "client CPU: progress, a record": progress,
        "client CPU: TensorBoard, a record": events,
        "client CPU: all, a record every 10 steps, per step": (arrival + progress + events) / DEFAULT_EVERY,
        "rank: a checkpoint of the tiny model": saving.after(100) - saving.after(100, 50),
        "a step of ResNet-18": statistics.median(large.step_us),
        "rank: a checkpoint of it (85 MiB), while training waits": (
            large_saving.after(LARGE_EVERY) - large_saving.after(LARGE_EVERY, LARGE_EVERY // 2)
        ),
        "rank CPU: during training, to write it and its sum": storing(),
        "client CPU: to take it, look at its sum, store it": (
            (large_saving.client_s - large.client_s) * 1e6 / (LARGE_STEPS // LARGE_EVERY)
        ),
    }


def counting() -> float:
    """Microseconds for what the loop does with the metrics of each batch of 64."""
    torch.set_num_threads(1)
    meter, loss, batch = Meter(torch.device("cpu")), torch.rand(()), (torch.rand(64, 10), torch.zeros(64).long())
    task = Classification(lambda prediction, target: loss)
    runs = timeit.repeat(lambda: meter.add(count(task.step(lambda logits: logits, batch), 64)), number=1_000, repeat=5)
    return statistics.median(runs) * 1_000


def writing_events() -> float:
    """Microseconds that the client's TensorBoard writer takes for a record."""
    metrics = dict.fromkeys(("train/loss", "train/accuracy", "lr", "samples_per_s", "data_wait", "slowest_rank"), 0.5)
    with tempfile.TemporaryDirectory() as folder:
        writer = TensorBoardWriter(Path(folder))
        begin = time.process_time()
        for step in range(STEPS):
            writer.write(Record(Metrics(metrics, 0, 8 * step), 0, step))
        spent = time.process_time() - begin
        writer.close()
    return spent / STEPS * 1e6


def storing() -> float:
    """Microseconds of CPU that a thread of rank 0 takes to write a captured state, and its sum."""
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    state = TrainingState(Parallel().adopt(model), optimizer, constant(optimizer, 1), Position(), {})
    content = state.begin_capture()()
    with tempfile.TemporaryDirectory() as folder:
        results.connect(Here(Path(folder)))
        begin = time.process_time()
        results.submit_file("state.pt", lambda path: checkpoint.write(content, path, 0))
        spent = time.process_time() - begin
        results.connect(None)
    return 1e6 * spent


@dataclass(frozen=True)
class Here:
    """Drop all records.

    Args:
        outbox: folder for files.
    """

    outbox: Path

    def send(self, record: Record) -> None:
        """Drop it."""


def run(without: tuple[str, ...], every: int, *overrides: str, model: tuple[str, ...] = MLP, steps: int = STEPS) -> Ran:
    """Run a job with a record every n steps, without some writers."""
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
