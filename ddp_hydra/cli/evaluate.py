"""`python -m ddp_hydra evaluate run=<run dir>`: repeat a run's validation with its best, last or any checkpoint.

Each sample is counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import MISSING

from ddp_hydra.cli.key_value import parse
from ddp_hydra.errors import ConfigError

USAGE = """python -m ddp_hydra evaluate run=<run directory, its URL, or checkpoint> [which=best|last]
    [key=value of the run's config …]"""


@dataclass
class Options:
    """The options of this command.

    Args:
        run: run directory or checkpoint file, or the URL of a run.
        which: the checkpoint of a run directory.
    """

    run: str = MISSING
    which: str = "best"


def main(words: Sequence[str]) -> None:
    """Evaluate a checkpoint and print its metrics."""
    from ddp_hydra.training import builders, load_run

    options, overrides = parse(Options, words, USAGE)
    run = load_run.load(options.run, options.which, overrides)
    node = run.cfg.data.get("val")
    if node is None:
        raise ConfigError("this run has no validation data (data.val is null): name a data set with data.val…=")
    val_set = builders.dataset(node)
    channels_last = builders.channels_last(run.cfg, run.model)
    task = builders.task(run.cfg, run.train_set, run.device)
    metrics = builders.evaluation(run.cfg, val_set, task, run.device, channels_last).run(run.model)
    print(f"{run.path} (step {run.step}), {len(val_set):,} samples")  # noqa: T201
    for name, value in metrics.items():
        print(f"{name} {value:.6f}")  # noqa: T201
