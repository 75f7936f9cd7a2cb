"""Refuses a config that is no job, and packs the project space."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from ddp_hydra.cluster import connect
from ddp_hydra.config import project, targets, unknown_keys
from ddp_hydra.config import schema as configs
from ddp_hydra.rank import fault_injection


def packed_project(cfg: DictConfig, plain: dict[str, Any]) -> project.Project:
    """Pack the project space, once the ranks are known to find in it what the config names."""
    root = project.find()
    targets.check(plain, root, connect.is_local(cfg.cluster) or connect.is_inline(cfg.cluster))
    return project.pack(root)


def check(cfg: DictConfig) -> None:
    """Refuse what no job can mean."""
    unknown_keys.check(cfg)
    configs.check(cfg)
    fault_injection.parse(cfg.faults)
