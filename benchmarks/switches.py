"""Measures what each switch of the trainer changes: images/s, memory and loss, compared with the job without it."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import commands, report

BASE = (
    *("data=s3_images", "model=resnet18", "data.batch_size=32", "trainer.epochs=null", "trainer.max_steps=60"),
    *("trainer.validate_every_epochs=0", "trainer.checkpoint_every_epochs=0"),
)
"""ResNet-18 on real digits of 32x32, two ranks; the cosine ends after the last step."""
BETWEEN = 5
"""Switches from one run of the job as it is to the next."""
BEFORE = 20
"""Steps that are not counted: connections, caches and compilation are new to them."""
SWITCHES: tuple[tuple[str, ...], ...] = (
    (),
    ("trainer.channels_last=false",),
    ("trainer.precision=bf16",),
    ("trainer.compile=default",),
    ("trainer.compile=default", "trainer.precision=bf16"),
    ("trainer.activation_checkpointing=[BasicBlock]",),
    ("trainer.gradient_accumulation_steps=4", "data.batch_size=8"),
    ("trainer.clip_norm=1",),
    ("trainer.ema_decay=0.98",),
    ("trainer.freeze=['*','!fc.*']",),
    ("trainer.decay_all=false",),
    ("optimizer.fused=false",),
    ("loss.label_smoothing=0.1",),
    ("mix=mixup",),
    ("mix=cutmix",),
    ("metrics=classification",),
    ("parallel.gradient_as_bucket_view=false",),
    ("parallel.static_graph=true",),
    ("parallel.find_unused_parameters=true",),
    ("parallel.bucket_cap_mb=5",),
    ("parallel.bucket_cap_mb=100",),
    ("parallel.comm_hook=none",),
    ("parallel.comm_hook=fp16",),
    ("parallel.comm_hook=bf16",),
    ("parallel.comm_hook=powersgd", "parallel.start_step=10"),
    ("parallel.comm_hook=post_local_sgd", "parallel.start_step=10"),
    ("parallel.batchnorm=average",),
    ("parallel=none", "dispatch.ranks=1", "data.batch_size=64"),
)


@dataclass(frozen=True)
class Run:
    """Holds the results of one job.

    Args:
        images_per_s: median of the records after the first steps.
        memory_mib: the most that a rank took, torch itself included.
        loss: of validation, at the end.
        accuracy: of validation, at the end.
    """

    images_per_s: float
    memory_mib: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Row:
    """Holds a line of the table: medians over the repeats.

    Args:
        switch: the overrides.
        images_per_s: with them.
        speed: over that without.
        memory_mib: with them.
        loss: with them.
        accuracy: with them.
    """

    switch: str
    images_per_s: float
    speed: float
    memory_mib: float
    loss: float
    accuracy: float


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each switch (3)")
    parser.add_argument("--only", default="", help="measure only switches that contain this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE")
    arguments = parser.parse_args()
    switches = [switch for switch in SWITCHES if not switch or arguments.only in " ".join(switch)]
    rows = measure(switches, arguments.repeats)
    Console(width=130).print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def measure(switches: Sequence[tuple[str, ...]], repeats: int) -> list[Row]:
    """Run all in turn, there and back, and the job as it is again and again: the machine is not always as fast."""
    runs: dict[tuple[str, ...], list[Run]] = {switch: [] for switch in switches}
    changed = [switch for switch in switches if switch]
    for turn in range(repeats):
        turns = enumerate(changed[:: -1 if turn % 2 else 1])
        pairs = (((), switch) if n % BETWEEN == 0 else (switch,) for n, switch in turns)
        for switch in chain(*pairs, ((),)):
            runs[switch].append(run(switch))
            report.progress(f"{' '.join(switch) or 'as it is'}: {runs[switch][-1]}")
    plain = median(runs[()])
    return [row(switch, median(found), plain) for switch, found in runs.items()]


def run(switch: tuple[str, ...]) -> Run:
    """Train once."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run_dir = Path(folder) / "run"
        commands.ddp_hydra(*BASE, *switch, run_dir=run_dir)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text())
    speeds = [line["samples_per_s"] for line in lines if line["step"] > BEFORE and "samples_per_s" in line]
    end = next(line for line in reversed(lines) if "val/loss" in line)
    memory_mib = summary["peak_memory"] / 2**20
    return Run(statistics.median(speeds), memory_mib, end["val/loss"], end["val/accuracy"])


def median(runs: Sequence[Run]) -> Run:
    """Return the median of each figure."""
    columns = zip(*(asdict(run).values() for run in runs), strict=True)
    return Run(*(statistics.median(column) for column in columns))


def row(switch: tuple[str, ...], found: Run, plain: Run) -> Row:
    """Return a line of the table."""
    return Row(" ".join(switch) or "as it is", speed=found.images_per_s / plain.images_per_s, **asdict(found))


def table(rows: Sequence[Row]) -> Table:
    """Return the table for the terminal."""
    shown = Table("switch", title=report.machine())
    for heading in ("images/s", "x", "memory, MiB", "val/loss", "val/accuracy"):
        shown.add_column(heading, justify="right")
    for row in rows:
        figures = (f"{row.images_per_s:,.0f}", f"{row.speed:.2f}", f"{row.memory_mib:,.0f}")
        shown.add_row(row.switch, *figures, f"{row.loss:.4f}", f"{row.accuracy:.4f}")
    return shown


if __name__ == "__main__":
    main()
