"""Samples/s of a whole job with all records on, beside the loop by hand, Lightning Fabric and Ray Train."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import commands, environments, overhead, report
from benchmarks.overhead import RANKS, WORK, Work
from benchmarks.report import Figure, Goal

PEERS = ("lightning-fabric>=2.5", "ray[train]>=2.50")
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(256 * 2**20), "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}
"""What ranks of ours get, for all sides."""


def measure(repeats: int) -> Iterator[Figure]:
    """Train by each side in turn."""
    python = environments.python("train", *PEERS)
    sides = {
        "by hand": lambda work, folder: script(work, folder, "ddp_loop.py"),
        "ddp_hydra": overhead.job,
        "Lightning Fabric": lambda work, folder: script(work, folder, "fabric_loop.py", python),
        "Ray Train": lambda work, folder: ray(work, folder, python),
    }
    for work in WORK:
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(repeats):
            for name, side in list(sides.items())[:: -1 if turn % 2 else 1]:
                with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                    speeds[name].append(side(work, Path(folder)))
                report.progress(f"{work.model}, {name}: {speeds[name][-1]:,.0f} samples/s")
        found = {name: report.speeds(f"{work.model} x {work.batch_size}, {name}", one) for name, one in speeds.items()}
        yield from found.values()
        for peer in ("by hand", "Lightning Fabric", "Ray Train"):
            goal = Goal(0.99 if peer == "by hand" else 1.0)
            yield report.ratio(f"{work.model}: ddp_hydra / {peer}", found["ddp_hydra"], found[peer], goal)


def script(work: Work, folder: Path, name: str, python: str | None = None) -> float:
    """Samples/s of one of the scripts under torchrun."""
    metrics = folder / "metrics.jsonl"
    command = commands.by_hand(name, *sizes(work), f"--metrics={metrics}", ranks=RANKS)
    commands.run([python or command[0], *command[1:]], {**commands.ONE_THREAD, **ALLOCATOR})
    return overhead.speed(metrics, work.skip)


def ray(work: Work, folder: Path, python: str) -> float:
    """Samples/s of Ray Train."""
    metrics = folder / "metrics.jsonl"
    path = str(commands.ROOT / "benchmarks" / "peers" / "ray_loop.py")
    quiet = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    commands.run([python, path, *sizes(work), f"--metrics={metrics}"], {**commands.ONE_THREAD, **ALLOCATOR, **quiet})
    return overhead.speed(metrics, work.skip)


def sizes(work: Work) -> tuple[str, ...]:
    """What all scripts are told."""
    return f"--model={work.model}", f"--batch-size={work.batch_size}", f"--steps={work.steps}"


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=3)
