"""Compares searches: a whole grid, the same by ASHA, and by ASHA of Ray Tune."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import commands, environments, report
from benchmarks.report import Figure, Goal

DROPOUTS = (0.0, 0.2, 0.5)
LRS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.3)
EPOCHS, WIDTH, BATCH_SIZE, SAMPLES = 27, 512, 32, 1437
AT_ONCE, REDUCTION = 2, 3
"""Jobs at the same time; one of this number goes on at each rung."""
RAY = ("ray[tune]>=2.50",)
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
STEPS = SAMPLES // BATCH_SIZE
"""In an epoch."""


@dataclass(frozen=True)
class Searched:
    """Holds what a search has taken and found.

    Args:
        wall_s: from the command to the prompt, in seconds.
        steps: of all jobs together.
        best: dropout and learning rate of the best job.
        values: the objective of each job by dropout and learning rate; empty where nobody asks.
    """

    wall_s: float
    steps: int
    best: tuple[float, float]
    values: dict[tuple[float, float], float]


def measure(repeats: int) -> Iterator[Figure]:
    """Search the grid once, and by ASHA with each side in turn."""
    python = environments.python("search", *RAY)
    ours: list[Searched] = []
    ray: list[Searched] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        grid = shown("grid", by_us(Path(folder) / "grid"))
        for turn in range(repeats):
            ours.append(
                shown("ddp_hydra", by_us(Path(folder) / f"ours-{turn}", f"{{rule: asha, reduction: {REDUCTION}}}"))
            )
            ray.append(shown("Ray Tune", by_ray(Path(folder) / f"ray-{turn}", python)))
    yield from figures(grid, ours, ray)


def figures(grid: Searched, ours: Sequence[Searched], ray: Sequence[Searched]) -> Iterator[Figure]:
    """Return the figures."""
    jobs = len(points())
    yield report.times(f"all {jobs} jobs to their end, ddp_hydra, {AT_ONCE} at once", [grid.wall_s])
    ours_took = report.times("ASHA, ddp_hydra", [one.wall_s for one in ours])
    ray_took = report.times("ASHA, Ray Tune", [one.wall_s for one in ray])
    yield from (ours_took, ray_took)
    yield report.ratio("Ray Tune / ddp_hydra", ray_took, ours_took, Goal(1))
    for name, sides, limit in (("ddp_hydra", ours, 0.4), ("Ray Tune", ray, None)):
        goal = None if limit is None else Goal(limit, at_most=True)
        shares = [one.steps / grid.steps for one in sides]
        yield report.times(f"share of the grid's steps, {name}", shares, goal, unit="x")
        goal = None if limit is None else Goal(1, at_most=True)
        places = [float(place(grid, one)) for one in sides]
        yield report.times(f"place in the grid of the job that was found, {name}", places, goal, unit=".")


def place(grid: Searched, found: Searched) -> int:
    """Return the place that the best job of a search has in the grid, from 1."""
    return 1 + sum(value > grid.values[found.best] for value in grid.values.values())


def points() -> list[tuple[float, float]]:
    """Dropout and learning rate of each job."""
    return list(itertools.product(DROPOUTS, LRS))


def by_us(folder: Path, rule: str = "null") -> Searched:
    """Our launcher: one command, no server is warm; checkpoints at pauses and ends."""
    command = [
        sys.executable, "-m", "ddp_hydra", "-m", commands.CONF,
        f"cluster.n_workers={AT_ONCE}",
        "dispatch.ranks=1",
        "data=digits_in_memory",
        f"data.batch_size={BATCH_SIZE}",
        "model=mlp",
        f"model.width={WIDTH}",
        "optimizer=sgd",
        "optimizer.momentum=0.9",
        "optimizer.weight_decay=0",
        "optimizer.nesterov=false",
        "scheduler=none",
        f"trainer.epochs={EPOCHS}",
        "trainer.threads=1",
        "trainer.checkpoint_every_epochs=0",
        "trainer.log_every_steps=100",
        "objective.metric=val/accuracy",
        "objective.direction=maximize",
        f"model.dropout={','.join(map(str, DROPOUTS))}",
        f"optimizer.lr={','.join(map(str, LRS))}",
        f"hydra.launcher.stop={rule}",
        f"hydra.sweep.dir={folder}",
    ]  # fmt: skip
    with commands.nobody_warm() as variables:
        begin = commands.run(command, {**commands.ONE_THREAD, **variables})
        wall_s = time.time() - begin
    rows: list[dict[str, Any]] = json.loads((folder / "sweep.json").read_text())["jobs"]
    values = {points()[row["number"]]: row["objective"] for row in rows if row["objective"] is not None}
    return Searched(wall_s, sum(row["step"] for row in rows), max(values, key=lambda job: values[job]), values)


def by_ray(folder: Path, python: str) -> Searched:
    """Ray Tune: one command, which brings up Ray; the loop by hand, without checkpoints."""
    folder.mkdir()
    search = {
        "trials": [{"dropout": dropout, "lr": lr} for dropout, lr in points()],
        "epochs": EPOCHS, "width": WIDTH, "batch_size": BATCH_SIZE, "at_once": AT_ONCE, "reduction": REDUCTION,
    }  # fmt: skip
    script = str(commands.ROOT / "benchmarks" / "peers" / "tune_asha.py")
    begin = commands.run([python, script, str(folder), json.dumps(search)], {**commands.ONE_THREAD, **QUIET})
    wall_s = time.time() - begin
    found = json.loads((folder / "result.json").read_text())
    return Searched(wall_s, sum(found["epochs"]) * STEPS, (found["best"]["dropout"], found["best"]["lr"]), {})


def shown(name: str, searched: Searched) -> Searched:
    """Print what was measured."""
    dropout, lr = searched.best
    report.progress(f"{name}: {searched.wall_s:.1f} s, {searched.steps:,} steps, best dropout={dropout} lr={lr}")
    return searched


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=2)
