"""Let Hydra find the starter's configs behind the project's own."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from ddp_hydra.config import project


class LayerConfigs(SearchPathPlugin):
    """Add the configs of all layers of the project space but the first, which is Hydra's main folder of configs.

    It is registered by the command, and not found in `hydra_plugins`: other Hydra apps don't get these configs.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders, and let that of `--config-dir` win: Hydra alone would put it behind the starter's."""
        given = get_args_parser().parse_known_args(sys.argv[1:])[0].config_dir
        if given:
            search_path.prepend("--config-dir", f"file://{Path(given).absolute()}", anchor="main")
        for folder in config_folders()[1:]:
            search_path.append("ddp_hydra", f"file://{folder}")


def config_folders() -> list[Path]:
    """Return the folders of configs of the project space; a config of an earlier one wins."""
    return [root / "conf" for root in project.layers() if (root / "conf").is_dir()]


def register() -> None:
    """Add the plugin to this process."""
    Plugins.instance().register(LayerConfigs)
