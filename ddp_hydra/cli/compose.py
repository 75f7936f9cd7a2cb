"""Compose a config in this process, as Hydra does for the command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from ddp_hydra.cli import search_path
from ddp_hydra.config import project, schema, unknown_keys
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.errors import ConfigError


def compose(words: Sequence[str], config_name: str = "config") -> DictConfig:
    """Return a config with Hydra's own part.

    Args:
        words: overrides, as Hydra reads them.
        config_name: the main config.

    Raises:
        ConfigError: this process composes one already, or a value has the wrong type.
        HydraException: there is no such config, or a value has the wrong type.
    """
    project.make_importable(project.layers())
    schema.register()
    if GlobalHydra.instance().is_initialized():
        raise ConfigError("this is called inside a Hydra app: call ddp_hydra.job.run.run_job(cfg, run_dir) there")
    with (
        search_path.layered() as folder,
        initialize_config_dir(str(folder), job_name="ddp_hydra", **VERSION_BASE),
    ):
        cfg: DictConfig = hydra_compose(config_name, list(words), return_hydra_config=True)
        repository: Any = getattr(GlobalHydra.instance().config_loader(), "repository", None)
    unknown_keys.check_typed(cfg, cfg.hydra.overrides.task, cfg.hydra.runtime.choices, repository)
    return cfg
