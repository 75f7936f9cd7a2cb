"""Composes a config: Hydra finds our plugins, the configs of a project, and the starter's behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from ddp_hydra.config import project, schema, unknown_keys
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.errors import ConfigError

PLUGINS = ("hydra_plugins.ddp_hydra_launcher:DaskDDPLauncher", "hydra_plugins.ddp_hydra_pbt:PBTSweeper")
"""Classes that Hydra finds by itself, but not in an editable install: it can't list its packages."""


class LayerConfigs(SearchPathPlugin):
    """Adds the configs of all layers of the project space but the first, which is Hydra's main folder of configs.

    It is not in `hydra_plugins`, and adds nothing outside of `layered`: other Hydra apps don't get these configs.

    Attributes:
        before: folders whose configs win over the project's.
        after: folders whose configs the project's win over.
    """

    before: tuple[Path, ...] = ()
    after: tuple[Path, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.before:
            search_path.prepend("--config-dir", f"file://{folder}", anchor="main")
        for folder in self.after:
            search_path.append("ddp_hydra", f"file://{folder}")


@contextmanager
def layered(config_dir: str | None = None) -> Iterator[Path]:
    """Let Hydra find the configs of all layers inside the block.

    Args:
        config_dir: a further folder, whose configs win: Hydra alone would put it behind the starter's.

    Yields:
        The first folder of configs, as the main one for Hydra.
    """
    Plugins.instance().register(LayerConfigs)
    for plugin in PLUGINS:
        module, _, name = plugin.partition(":")
        Plugins.instance().register(getattr(import_module(module), name))
    main, *after = [root / "conf" for root in project.layers() if (root / "conf").is_dir()]
    LayerConfigs.before, LayerConfigs.after = (Path(config_dir).absolute(),) if config_dir else (), tuple(after)
    try:
        yield main
    finally:
        LayerConfigs.before = LayerConfigs.after = ()


def compose(words: Sequence[str], config_name: str = "config") -> DictConfig:
    """Return a config with Hydra's own part, composed in this process as Hydra does it for the command.

    Raises:
        ConfigError: this process composes one already, or a value has the wrong type.
        HydraException: there is no such config, or a value has the wrong type.
    """
    project.make_importable(project.layers())
    schema.register()
    if GlobalHydra.instance().is_initialized():
        raise ConfigError("this is called inside a Hydra app: call ddp_hydra.job.run.run_job(cfg, run_dir) there")
    with layered() as folder, initialize_config_dir(str(folder), job_name="ddp_hydra", **VERSION_BASE):
        cfg: DictConfig = hydra_compose(config_name, list(words), return_hydra_config=True)
        unknown_keys.check_typed(cfg, cfg.hydra, GlobalHydra.instance().config_loader())
    return cfg
