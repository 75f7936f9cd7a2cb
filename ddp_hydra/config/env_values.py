"""Tells which values of a config the environment has given (`${oc.env:NAME}`), to say later that they are others.

A run keeps such an interpolation as it is written, because its value may be a secret. Only a value that hardly is one
is kept beside the config: a number, true, false, or a path that is there, if no name looks like a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.config import redact
from ddp_hydra.config.checkpoint_config import as_typed
from ddp_hydra.console.text import printable

FILE = ".hydra/environment.yaml"
"""In a run directory: the values by key."""
_VARIABLE = re.compile(r"\$\{oc\.env:\s*(\w+)\s*[,}]")
_OTHER = re.compile(r"\$\{(?!oc\.(env|decode):)")
"""Matches an interpolation whose value may be anything."""


def values_of(cfg: DictConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, raw in _written(OmegaConf.to_container(cfg, enum_to_str=True)).items():
        names = _VARIABLE.findall(raw) if key.partition(".")[0] != "cluster" else []
        if not names or len(names) != raw.count("oc.env:") or _OTHER.search(raw):
            continue
        around = key.split(".")
        if any(map(redact.named_secret, names)) or any(name.lower() in redact.SHORT for name in (*around, *names)):
            continue
        with suppress(OmegaConfBaseException):  # a variable that is not set; whoever needs the value says so
            value = OmegaConf.select(cfg, key)
            is_path = isinstance(value, str) and "/" in value and os.path.lexists(value)
            is_plain = isinstance(value, bool | int | float) or is_path
            if is_plain and not any(redact.is_secret(name, value) for name in around):
                found[key] = value
    return found


def _written(config: Any) -> dict[str, str]:
    """Return the texts of a config, in which interpolations may be, by key."""
    return {key: raw for key, raw in redact.values_of(config) if isinstance(raw, str)}


def written_alike(values: Mapping[str, Any], content: bytes, cfg: DictConfig) -> dict[str, Any]:
    """Return the values that are written alike in the config of a run and in `cfg`: others the user has changed.

    Args:
        content: the file of the run's config, which others may have written.
    """
    with suppress(yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError):
        config = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
        if isinstance(config, dict):
            then, now = _written(config), _written(OmegaConf.to_container(cfg, enum_to_str=True))
            return {key: one for key, one in values.items() if key in now and then.get(key) == now[key]}
    return {}


def encoded(values: Mapping[str, Any]) -> bytes:
    return yaml.safe_dump(dict(values)).encode()


def decoded(content: bytes) -> dict[str, Any]:
    """Return the values of a file, which others may have written; none if it is damaged."""
    with suppress(yaml.YAMLError, UnicodeDecodeError):
        found = yaml.safe_load(content)
        if isinstance(found, dict):
            return {str(key): one for key, one in found.items() if isinstance(one, bool | int | float | str)}
    return {}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each value that was known then and is another one now: "data.train.scale 4 -> 2.0"."""
    both = [key for key in now if key in before and repr(before[key]) != repr(now[key])]  # no NaN equals another
    return [printable(f"{key} {as_typed(before[key])} -> {as_typed(now[key])}") for key in both]
