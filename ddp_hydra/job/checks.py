"""Refuse a config that no job can run, and pack the project space."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from ddp_hydra.cluster import connect
from ddp_hydra.config import loggers, project, targets, unknown_keys, validate
from ddp_hydra.rank import fault_injection


def packed_project(cfg: DictConfig, config: dict[str, Any]) -> project.Project:
    """Check that the project space holds what the config names, and pack it.

    Args:
        cfg: the composed config.
        config: the same as plain values.
    """
    roots = project.layers()
    targets.check(config, roots, connect.is_local(cfg.cluster) or connect.is_inline(cfg.cluster))
    return project.pack(*roots)


def check(cfg: DictConfig) -> None:
    """Refuse a config that no job can run.

    Raises:
        ConfigError: the message says what is allowed.
    """
    unknown_keys.check(cfg)
    validate.check(cfg)
    loggers.check(cfg)
    fault_injection.parse(cfg.faults)
