"""Fills in what the config of a job has for the keys that only other jobs of the sweep give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddp_hydra.config import redact
from ddp_hydra.sweep.rows import Row, typed

_ABSENT = object()


def fill(row: Row, keys: Iterable[str], config: DictConfig, choices: Mapping[str, Any]) -> None:
    """Fill in the values of the keys that a job does not give itself.

    Args:
        row: of the job, changed in place.
        keys: that some job of the sweep gives.
        config: of the job, as it was composed.
        choices: the options of its groups, by group.
    """
    own = typed(row)
    for key in keys:
        if key not in own and key not in row.filled and (value := _value(key, config, choices)) is not None:
            row.filled[key] = value


def fill_from_folder(row: Row, keys: Iterable[str], folder: Path) -> None:
    """Do the same for a job that has started, from what Hydra has saved of it; a job without that stays as it is.

    Args:
        row: of the job, changed in place.
        keys: that some job of the sweep gives.
        folder: its run directory.
    """
    own = typed(row)
    if all(key in own or key in row.filled for key in keys):
        return
    with contextlib.suppress(OSError, YAMLError, OmegaConfBaseException, ValueError):
        config = OmegaConf.load(folder / ".hydra" / "config.yaml")
        hydra = OmegaConf.load(folder / ".hydra" / "hydra.yaml")
        choices = OmegaConf.select(hydra, "hydra.runtime.choices")
        if isinstance(config, DictConfig):
            fill(row, keys, config, choices if isinstance(choices, DictConfig) else {})


def _value(key: str, config: DictConfig, choices: Mapping[str, Any]) -> str | None:
    """Return a value as a user would type it; None if there is none, or it is a part of the config."""
    if redact.named_secret(key):
        return redact.HIDDEN
    if key in choices:
        option = choices[key]
        return None if option is None else _text(option)
    try:
        value = OmegaConf.select(config, key, default=_ABSENT)
    except (OmegaConfBaseException, ValueError):
        return None
    if value is _ABSENT or isinstance(value, DictConfig):
        return None
    return "null" if value is None else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, ListConfig | list | tuple):
        return f"[{','.join('null' if one is None else _text(one) for one in value)}]"
    return str(getattr(value, "name", value))  # of an enum, its name
