"""Compares steps that average gradients in shared memory with gloo's sockets: 2, 4 and 8 ranks of this host."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import commands, report
from benchmarks.report import Figure, Goal

RANKS = (2, 4, 8)
STEPS = {"ResNet-18": 40, "wide": 200, "narrow": 200}
"""Of each model: 43 MiB of gradients, 3.5 MiB, 0.2 MiB."""
FIRST = 5
"""Steps that are not counted."""


def measure(repeats: int) -> Iterator[Figure]:
    """Train by hand, with both ways in turn."""
    for model, steps in STEPS.items():
        for ranks in RANKS:
            runs = [run(model, steps, ranks) for _ in range(repeats)]
            for hook, name in (("none", "gloo"), ("shared", "shared memory")):
                medians = [1e3 * statistics.median(took[hook]) for took in runs]
                yield report.times(f"{model}, {ranks} ranks: a step with {name}", medians, unit="ms")
            ratios = [
                statistics.median(ours / gloo for ours, gloo in zip(took["shared"], took["none"], strict=True))
                for took in runs
            ]
            report.progress(f"{model}, {ranks} ranks: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
            name = f"{model}, {ranks} ranks: shared memory / gloo, step by step"
            yield report.times(name, ratios, Goal(1.0, at_most=True), unit="x")


def run(model: str, steps: int, ranks: int) -> dict[str, list[float]]:
    """Seconds of each step, by the hook."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result = Path(folder) / "steps.json"
        commands.torchrun("exchange_steps.py", model, str(steps), str(result), ranks=ranks)
        return {hook: took[FIRST:] for hook, took in json.loads(result.read_text()).items()}


if __name__ == "__main__":
    report.main(__doc__ or "", measure, repeats=3)
