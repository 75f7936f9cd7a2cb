"""Configs of this checkout's conf/."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config import schema
from ddp_hydra.config.hydra_compat import VERSION_BASE

CONF = Path(__file__).parents[3] / "conf"


@functools.cache
def _composed(*overrides: str) -> DictConfig:
    schema.register()
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        return compose("config", overrides=list(overrides))


def composed(*overrides: str) -> DictConfig:
    return copy.deepcopy(_composed(*overrides))


def changed(values: dict[str, Any], *overrides: str) -> DictConfig:
    """Set keys of a config, with the types that it has: that takes a tenth of the time in which Hydra composes it."""
    cfg = composed(*overrides)
    for key, value in values.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg
