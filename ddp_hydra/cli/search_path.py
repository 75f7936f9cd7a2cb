"""Let Hydra find our plugins, and the starter's configs behind the project's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from ddp_hydra.config import project

PLUGINS = ("hydra_plugins.ddp_hydra_launcher:DaskDDPLauncher", "hydra_plugins.ddp_hydra_pbt:PBTSweeper")
"""Classes that Hydra finds by itself, but for those of an editable install: it can't list their packages."""


class LayerConfigs(SearchPathPlugin):
    """Add the configs of all layers of the project space but the first, which is Hydra's main folder of configs.

    It is not in `hydra_plugins`, and adds nothing outside of `layered`: other Hydra apps don't get these configs.

    Attributes:
        before: folders whose configs win over the project's.
        after: folders whose configs the project's win over.
    """

    before: tuple[Path, ...] = ()
    after: tuple[Path, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders."""
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
    main, *after = config_folders()
    LayerConfigs.before, LayerConfigs.after = (Path(config_dir).absolute(),) if config_dir else (), tuple(after)
    try:
        yield main
    finally:
        LayerConfigs.before = LayerConfigs.after = ()


def config_folders() -> list[Path]:
    """Return the folders of configs of the project space; a config of an earlier one wins."""
    return [root / "conf" for root in project.layers() if (root / "conf").is_dir()]
