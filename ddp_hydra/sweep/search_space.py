"""Refuses words of a sweep that give its sweeper nothing to run, before anything starts.

Every Hydra app imports it, so it imports little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config.limits import AtLeast1, check_limits
from ddp_hydra.errors import ConfigError

BASIC, OPTUNA, PBT = "BasicSweeper", "OptunaSweeper", "PopulationSweeper"
_LIMITS: dict[str, Mapping[str, Any]] = {
    BASIC: {"max_batch_size": AtLeast1 | None},
    OPTUNA: {"n_trials": AtLeast1, "n_jobs": AtLeast1},
}


def check(config: DictConfig, config_loader: Any) -> None:
    """Refuse what Hydra's sweeper and Optuna's end at with a traceback, and sweeps without a job."""
    from ddp_hydra.config.hydra_compat import typed_words

    options = config.hydra.sweeper
    sweeper = str(options.get("_target_")).rpartition(".")[2]
    limits = _LIMITS.get(sweeper, {})
    check_limits("hydra.sweeper.", {key: options.get(key) for key in limits}, limits)
    words = [*(f"{key}={value}" for key, value in (options.get("params") or {}).items()), *typed_words(config.hydra)]
    overrides = OverridesParser.create(config_loader=config_loader).parse_overrides(words)
    last = {override.get_key_element(): override for override in overrides}
    for override in overrides:  # Optuna and PBT read also those that a later one of the same key replaces
        is_read = sweeper in (OPTUNA, PBT) or isinstance(override.value(), IntervalSweep)
        if is_read or override is last[override.get_key_element()]:
            check_override(override, sweeper)
    if str(OmegaConf.select(options, "sampler._target_")).endswith("GridSampler"):
        swept = {override.get_key_element(): override for override in overrides if override.is_sweep_override()}
        for override in swept.values():
            _check_of_grid(override)


def _check_of_grid(override: Override) -> None:
    value, line = override.value(), override.input_line
    if isinstance(value, IntervalSweep):
        ends, step = (value.start, value.end), 1.0
        if "log" in value.tags or not all(isinstance(end, int) for end in ends):
            raise ConfigError(
                f"{line}: hydra/sweeper/sampler=grid takes values: give choice(…) or range(…), or another sampler, as "
                "hydra/sweeper/sampler=tpe"
            )
    elif isinstance(value, RangeSweep) and not value.shuffle:
        ends, step = (value.start, value.stop), value.step
    else:
        return
    low, high = (float(end or 0) for end in ends)
    if high - low < step:
        raise ConfigError(f"{line}: hydra/sweeper/sampler=grid leaves out the end, so no value is left: give choice(…)")


def check_override(override: Override, sweeper: str) -> None:
    if not override.is_sweep_override():
        return
    value, line, key = override.value(), override.input_line, override.get_key_element()
    if isinstance(value, IntervalSweep):
        low, high = (math.nan if end is None else float(end) for end in (value.start, value.end))
        is_one = low == high and sweeper != PBT
        if not (low < high or is_one) or ("log" in value.tags and low <= 0):
            raise ConfigError(
                f"{line}: an interval goes from a number to a larger one, and with log from more than 0, as in "
                f"'{key}=tag(log,interval(0.001,0.1))'"
            )
        if sweeper == BASIC:
            raise ConfigError(
                f"{line}: only a sweeper that searches draws from an interval: give {key}={low:.15g},{high:.15g} "
                "or add hydra/sweeper=optuna"
            )
        return
    if isinstance(value, Glob) and sweeper in (OPTUNA, PBT):
        raise ConfigError(f"{line}: give the names one by one, choice(a,b)")
    try:
        is_empty = next(override.sweep_string_iterator(), None) is None
    except (HydraException, ValueError, TypeError) as error:
        raise ConfigError(f"{line}: {error}") from None
    if is_empty and isinstance(value, Glob):
        options = override.config_loader.get_group_options(override.key_or_group) if override.config_loader else []
        found = f"the options of {key} are {', '.join(options)}" if options else f"{key} is no group with options"
        raise ConfigError(f"{line}: this matches nothing: {found}")
    if isinstance(value, RangeSweep) and sweeper == OPTUNA and not value.shuffle:  # it draws the end, too
        is_empty = float(value.stop or 0) < float(value.start or 0) or value.step < 0
    if is_empty:
        down = "" if sweeper == OPTUNA else "; one that goes down needs a step below 0, range(5,0,-1)"
        raise ConfigError(
            f"{line}: no value is in this range: it goes from a number up to a larger one, range(0,5){down}"
        )
