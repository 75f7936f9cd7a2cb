"""Reads `results.loggers`: which loggers a job has, and the parameters that they get."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config import redact
from ddp_hydra.config.checkpoint_config import leaves
from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError

NAMES = ("mlflow", "wandb", "aim", "clearml")
"""Loggers that ship; their settings are the keys of this name in `results`, each name is also its package and extra."""
CHECKPOINTS = (None, "best", "all")
_NOT_LOGGED = ("cluster", "results", "resume", "detach", "faults", "dry_run", "tags")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def nodes(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in OmegaConf.to_container(cfg.results.loggers, resolve=True, throw_on_missing=True):  # type: ignore[union-attr]
        if isinstance(entry, str) and entry in NAMES:
            name, node = entry, OmegaConf.to_container(cfg.results[entry], resolve=True, throw_on_missing=True)
        elif isinstance(entry, dict) and isinstance(entry.get("_target_"), str):
            name, node = str(entry["_target_"]).rpartition(".")[2], entry
        else:
            hint = text.meant(entry, NAMES) if isinstance(entry, str) else ""
            allowed = text.after(hint, f"give {', '.join(NAMES)} or a _target_")
            raise ConfigError(f"results.loggers has {entry!r}{allowed}")
        if name in found:
            raise ConfigError(f"results.loggers names {name} more than once: leave one out")
        assert isinstance(node, dict)
        found[name] = {str(key): value for key, value in node.items()}
    return found


def check(cfg: DictConfig) -> None:
    for name, node in nodes(cfg).items():
        if name in NAMES and node.get("checkpoints") not in CHECKPOINTS:
            raise ConfigError(f"results.{name}.checkpoints={node['checkpoints']}: give best, all or null")


def check_installed(cfg: DictConfig) -> None:
    for name in nodes(cfg):
        if name in NAMES and importlib.util.find_spec(name) is None:
            raise ConfigError(f"results.loggers=[{name}] needs a package: pip install 'ddp-hydra[{name}]'")


def parameters(cfg: DictConfig) -> dict[str, Any]:
    """Return the config that a logger shows, flattened: {"optimizer.lr": 0.1}.

    The cluster and secrets are left out. An interpolation becomes the value of the key that it names; with a resolver
    (${oc.env:NAME}) it stays as it is, because its value may be a secret.
    """
    raw = OmegaConf.to_container(cfg, enum_to_str=True)
    assert isinstance(raw, dict)
    kept = redact.without({key: value for key, value in raw.items() if key not in _NOT_LOGGED})
    values = dict(leaves(kept))
    return {key: _followed(value, values) for key, value in values.items()}


def _followed(value: Any, values: dict[str, Any]) -> Any:
    for _ in range(10):  # chains are short; a circle has been refused long before
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[1] not in values:
            break
        value = values[match[1]]
    return value
