"""Measures how long `ddp-hydra runs ls` takes with 10,000 runs, and TensorBoard's tab *Runs* with 1,000.

Each is measured without an index, with it, and after a few changes.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import report
from benchmarks.report import Figure, Goal
from ddp_hydra.api import ComposedConfig

RUNS = 10_000
CHANGED = 100
DAYS = 50
WARM_GOAL = Goal(2.0, at_most=True)
RUNS_OF_PAGE = 1_000
PAGE_GOAL = Goal(1.0, at_most=True)


def measure(repeats: int) -> Iterator[Figure]:
    """List the runs of a temporary folder in turn without an index, with it, and after some have changed."""
    found: dict[str, list[float]] = {"cold": [], "warm": [], "warm, CPU": [], "changed": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        begin = time.perf_counter()
        runs = write_runs(folder / "outputs", RUNS)
        report.progress(f"{RUNS:,} runs written in {time.perf_counter() - begin:.0f} s")
        for turn in range(repeats):
            shutil.rmtree(folder / "cache", ignore_errors=True)
            found["cold"].append(listing_s(folder)[0])
            wall_s, cpu_s = listing_s(folder)
            found["warm"].append(wall_s)
            found["warm, CPU"].append(cpu_s)
            for run in runs[:CHANGED]:
                write_summary(run, turn + 1)
            found["changed"].append(listing_s(folder)[0])
            report.progress(
                f"{turn + 1} of {repeats}: {', '.join(f'{key} {one[-1]:.2f} s' for key, one in found.items())}"
            )
    yield report.times(f"the command, {RUNS:,} runs, without the index", found["cold"])
    yield report.times("with the index", found["warm"], WARM_GOAL)
    yield report.times("with the index, CPU time", found["warm, CPU"])
    yield report.times(f"with the index, {CHANGED} runs have changed", found["changed"], WARM_GOAL)
    yield from measure_page(repeats)


def measure_page(repeats: int) -> Iterator[Figure]:
    """Ask TensorBoard's plugin for the runs of a temporary folder in a new process, and again after some changes."""
    found: dict[str, list[float]] = {"cold": [], "warm": [], "changed": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        runs = write_runs(folder / "outputs", RUNS_OF_PAGE)
        for _ in range(repeats):
            shutil.rmtree(folder / "cache", ignore_errors=True)
            found["cold"].append(page_s(folder, [])[0])
            first_s, second_s = page_s(folder, runs[:CHANGED])
            found["warm"].append(first_s)
            found["changed"].append(second_s)
    yield report.times(f"the page's first answer, {RUNS_OF_PAGE:,} runs, without the index", found["cold"])
    yield report.times("with the index", found["warm"], PAGE_GOAL)
    yield report.times(f"a later answer, {CHANGED} runs have changed", found["changed"], PAGE_GOAL)


def page_s(folder: Path, changed: list[Path]) -> tuple[float, float]:
    """Return how long the plugin takes for its first answer, and for one after some runs have changed, in seconds."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    words = [sys.executable, "-m", "benchmarks.runs_page", str(folder / "outputs")]
    with subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        for run in changed:
            write_summary(run, int(time.time()))
        process.stdin.close()
        second = json.loads(process.stdout.readline())
    assert (first["rows"], second["rows"]) == (RUNS_OF_PAGE, len(changed))
    return first["took_s"], second["took_s"]


def write_runs(outputs: Path, count: int) -> list[Path]:
    """Write run directories with the files that a job leaves, but checkpoints and curves, and return them."""
    folder = outputs.parent
    composed = ComposedConfig(["experiment=digits", f"hydra.run.dir={folder / 'composed'}"])
    composed.save()
    saved = {path.name: path.read_bytes() for path in (composed.run_dir / ".hydra").iterdir()}
    shutil.rmtree(composed.run_dir)
    runs = []
    for number in range(count):
        run = outputs / f"day-{number % DAYS:02}" / f"{number:06}"
        (run / ".hydra").mkdir(parents=True)
        for name, content in saved.items():
            (run / ".hydra" / name).write_bytes(content)
        (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
        write_summary(run, 0)
        runs.append(run)
    return runs


def write_summary(run: Path, change: int) -> None:
    """Write a summary.json as a job's, with the number of the change as its steps."""
    metrics = dict.fromkeys(("train/loss", "train/accuracy", "lr", "samples_per_s", "val/loss", "val/accuracy"), 0.5)
    summary = {
        "status": "done",
        "tags": ["digits"],
        "failure": None,
        "project": "0" * 64,
        "objective": {"metric": "val/accuracy", "direction": "maximize"},
        "attempts": [],
        "steps": change,
        "metrics": metrics,
        "started": 1.79e9 + int(run.name),
        "wall_s": 10.0,
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=2))


def listing_s(folder: Path) -> tuple[float, float]:
    """Return how long the command takes, from its start to its end, and its CPU time, in seconds."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    words = [sys.executable, "-m", "ddp_hydra", "runs", "ls", str(folder / "outputs"), "limit=20"]
    begin, before = time.perf_counter(), cpu_of_children_s()
    printed = subprocess.run(words, env=variables, check=True, capture_output=True, text=True).stdout
    spent = time.perf_counter() - begin
    assert f"{RUNS - 20:,} more" in printed
    return spent, cpu_of_children_s() - before


def cpu_of_children_s() -> float:
    """Return the CPU time of all processes that this one has waited for, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=3)
