"""`ddp-hydra evaluate run=<run>`: validate a trained model again, or on other data. Each sample is counted once."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from ddp_hydra.cli import overrides, run_config
from ddp_hydra.cli.key_value import parse
from ddp_hydra.job.inference import EVALUATE
from ddp_hydra.storage.run_ref import RunRef

USAGE = """ddp-hydra evaluate run=<run directory, its URL, or checkpoint> [which=best|last] [split=val|train]
    [data=<group> and other groups and keys of the run's config …] [cluster=… cluster.n_workers=… dispatch.…=…]"""


@dataclass
class Options:
    """The options of this command; see `evaluate`."""

    run: str = MISSING
    which: str = "best"
    split: str = "val"


def main(words: Sequence[str]) -> None:
    """Evaluate a checkpoint and print its metrics."""
    options, changes = parse(Options, overrides.with_faults(list(words)), USAGE, run_config.GROUPS)
    found = evaluate(options.run, options.which, options.split, changes)
    samples = "" if found["samples"] is None else f", {found['samples']:,} samples"
    print(f"{found['checkpoint']} (step {found['step']}){samples}")  # noqa: T201
    for name, value in found["metrics"].items():
        print(f"{name} {value:.6f}")  # noqa: T201
    for name, rows in found["matrices"].items():
        print(f"{name} {rows}")  # noqa: T201


def evaluate(run: str, which: str = "best", split: str = "val", changes: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluate a checkpoint, and return metrics, samples, step and the file of the checkpoint.

    Args:
        run: run directory or checkpoint file, or the URL of a run.
        which: the checkpoint of a run directory, "best" or "last".
        split: the data set of the config, "val" or "train".
        changes: groups and keys of the run's config: "data=wids", "cluster.n_workers=4".

    Raises:
        DdpHydraError: there is no such run, a change does not fit, or it failed.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder:
        checkpoint = RunRef.of(run).checkpoint(which, Path(folder))
        found = run_config.inference(run, checkpoint, split, changes).run(EVALUATE)
        shown = Path(run) / "checkpoints" / checkpoint.name if Path(run).is_dir() else checkpoint
        return {**found, "checkpoint": str(shown)}
