"""`python -m ddp_hydra generate run=<run dir> n=50`: let a trained model make up new samples.

How a model is sampled is the business of its data set, which knows the alphabet and what was seen in training:
any data set with `sample(model, n, temperature, seed) -> list[str]` will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import MISSING

from ddp_hydra.cli.key_value import parse
from ddp_hydra.errors import ConfigError
from ddp_hydra.training import load_run

USAGE = """python -m ddp_hydra generate run=<run directory, its URL, or checkpoint> [n=50] [temperature=1.0] [seed=0]
    [which=best|last] [key=value of the run's config …]"""


@dataclass
class Options:
    """Of the command line.

    Args:
        run: run directory or checkpoint file, or the URL of a run.
        n: how many samples.
        temperature: below 1 plays safe, above 1 dares.
        seed: of the sampling.
        which: the checkpoint of a run directory.
    """

    run: str = MISSING
    n: int = 50
    temperature: float = 1.0
    seed: int = 0
    which: str = "best"


def main(words: Sequence[str]) -> None:
    """Entry of `python -m ddp_hydra generate`."""
    options, overrides = parse(Options, words, USAGE)
    if options.n < 1 or options.temperature <= 0:
        raise ConfigError(
            f"n={options.n}, temperature={options.temperature}: n must be at least 1, temperature above 0"
        )
    run = load_run.load(options.run, options.which, overrides)
    if not hasattr(run.train_set, "sample"):
        raise ConfigError(
            f"{type(run.train_set).__name__} has no sample(model, n, temperature, seed), so this run can't generate; "
            "experiment=pet_names makes one that can"
        )
    for line in run.train_set.sample(run.model, options.n, options.temperature, options.seed):
        print(line)  # noqa: T201
