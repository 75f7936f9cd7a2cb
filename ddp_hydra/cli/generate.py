"""`ddp-hydra generate run=<run dir> n=50`: generate samples with a trained model.

The data set samples from the model, because it knows the alphabet and the training samples. It needs a method
`sample(model, n, temperature, seed) -> list[str]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import MISSING

from ddp_hydra.cli.key_value import parse
from ddp_hydra.errors import ConfigError
from ddp_hydra.training import load_run

USAGE = """ddp-hydra generate run=<run directory, its URL, or checkpoint> [n=50] [temperature=1.0] [seed=0]
    [which=best|last] [key=value of the run's config …]"""


@dataclass
class Options:
    """The options of this command.

    Args:
        run: run directory or checkpoint file, or the URL of a run.
        n: number of samples.
        temperature: values below 1 prefer likely samples, values above 1 unlikely ones.
        seed: of the random numbers.
        which: the checkpoint of a run directory.
    """

    run: str = MISSING
    n: int = 50
    temperature: float = 1.0
    seed: int = 0
    which: str = "best"


def main(words: Sequence[str]) -> None:
    """Generate samples and print them."""
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
