"""The options of `hydra/sweeper=pbt`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.pbt.population import Rules

DEFAULTS: dict[str, Any] = {
    "population": 8,
    "generations": 4,
    "validations": 1,
    "quantile": 0.2,
    "resample_probability": 0.25,
    "factors": [0.8, 1.2],
    "seed": 0,
    "params": {},
}


class Settings:
    """Check the options of the sweeper.

    Args:
        population: members of a generation.
        generations: how many there are; the last one trains to the end of the run.
        validations: after so many validations, a generation ends.
        quantile: see `population.Rules`, as for the next three.
        resample_probability: see there.
        factors: see there.
        seed: see there.

    Raises:
        ConfigError: a value can't be.
    """

    def __init__(
        self,
        population: int = 8,
        generations: int = 4,
        validations: int = 1,
        quantile: float = 0.2,
        resample_probability: float = 0.25,
        factors: Sequence[float] = (0.8, 1.2),
        seed: int = 0,
    ) -> None:
        for name, value, least in (
            ("population", population, 2),
            ("generations", generations, 1),
            ("validations", validations, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _refused(name, value, f"a whole number of at least {least}")
        if not _is_share(quantile) or quantile > 0.5:
            raise _refused("quantile", quantile, "a share from 0 to 0.5")
        if not _is_share(resample_probability):
            raise _refused("resample_probability", resample_probability, "a share from 0 to 1")
        factors = tuple(factors)
        if not factors or not all(isinstance(one, int | float) and one > 0 for one in factors):
            raise _refused("factors", list(factors), "numbers above 0, [0.8,1.2]")
        if not isinstance(seed, int):
            raise _refused("seed", seed, "a whole number")
        self.population, self.generations, self.validations = population, generations, validations
        self.rules = Rules(quantile, resample_probability, factors, seed)

    def pause_after(self, generation: int) -> int | None:
        """Return the number of validations after which a generation pauses; None for the last one."""
        return None if generation == self.generations - 1 else self.validations * (generation + 1)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _refused(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"hydra.sweeper.{name}={value}: give {allowed}")
