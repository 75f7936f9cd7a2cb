"""Composes a config: Hydra finds our plugins, the configs of a project, and the starter's behind them.

Inside the command Hydra composes once, checks what it has composed, lists options quickly, and saves no secrets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core import utils
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig

from ddp_hydra.config import project, redact, schema, unknown_keys
from ddp_hydra.config.hydra_compat import IS_1_3, VERSION_BASE
from ddp_hydra.errors import ConfigError, DdpHydraError


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
    """Let Hydra find the configs of all layers inside the block; `config_dir` wins, which Hydra would put last."""
    Plugins.instance().register(LayerConfigs)
    main, *after = [root / "conf" for root in project.layers() if (root / "conf").is_dir()]
    LayerConfigs.before, LayerConfigs.after = (Path(config_dir).absolute(),) if config_dir else (), tuple(after)
    try:
        yield main
    finally:
        LayerConfigs.before = LayerConfigs.after = ()


def compose(words: Sequence[str], config_name: str = "config") -> DictConfig:
    """Return a config with Hydra's own part, composed in this process as Hydra does it for the command."""
    project.make_importable(project.layers())
    schema.register()
    if GlobalHydra.instance().is_initialized():
        raise ConfigError("this is called inside a Hydra app: call ddp_hydra.job.run.run_job(cfg, run_dir) there")
    with layered() as folder, initialize_config_dir(str(folder), job_name="ddp_hydra", **VERSION_BASE):
        try:
            cfg: DictConfig = hydra_compose(config_name, list(words), return_hydra_config=True)
            unknown_keys.check_typed(cfg, cfg.hydra, GlobalHydra.instance().config_loader())
        except Exception as error:
            if isinstance(error, DdpHydraError) or (said := unknown_keys.explain(error)) is None:
                raise
            raise ConfigError(said) from error
    return cfg


@contextmanager
def patched(owner: Any, name: str, function: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def composed_once(multirun: bool) -> Iterator[None]:
    """Let Hydra use, inside the block, the config from which it has read the mode.

    To find out whether a command line is a sweep (`hydra.mode`), Hydra 1.3 composes all of the config, throws it away,
    and composes it again. That is a good part of the time to the first step of a job whose fork server is warm. Hydra
    1.4 finds it without.
    """
    if not IS_1_3:
        yield
        return
    wanted = RunMode.MULTIRUN if multirun else RunMode.RUN
    word = f"hydra.mode={wanted.name}"
    load: Any = ConfigLoaderImpl.load_configuration
    find_mode: Any = Hydra.get_mode
    kept: dict[tuple[str | None, tuple[str, ...]], DictConfig] = {}

    def get_mode(self: Any, config_name: str | None, overrides: list[str]) -> Any:
        try:
            cfg = self.config_loader.load_configuration(config_name, overrides, run_mode=wanted)
            mode = cfg.hydra.mode
        except Exception:  # a sweep, or a mistake that Hydra reports when it composes again
            return find_mode(self, config_name, overrides)
        if mode is None:  # Hydra adds this word, and composes again
            cfg.hydra.mode = wanted
            cfg.hydra.overrides.hydra.append(word)
            kept[config_name, (*overrides, word)] = cfg
        return mode

    def load_configuration(
        self: Any, config_name: str | None, overrides: list[str], run_mode: RunMode, *args: Any, **kwargs: Any
    ) -> Any:
        cfg = kept.pop((config_name, tuple(overrides)), None) if run_mode is wanted else None
        return load(self, config_name, overrides, run_mode, *args, **kwargs) if cfg is None else cfg

    with patched(ConfigLoaderImpl, "load_configuration", load_configuration), patched(Hydra, "get_mode", get_mode):
        yield


def checked_as_composed() -> AbstractContextManager[None]:
    """Check what was typed, and the experiment, when Hydra has composed a job, so that `--cfg job` refuses it, too."""
    original: Any = Hydra.compose_config

    def compose_config(
        self: Any, config_name: str | None, overrides: list[str], run_mode: RunMode, *args: Any, **more: Any
    ) -> Any:
        cfg = original(self, config_name, overrides, run_mode, *args, **more)
        if run_mode is RunMode.RUN:  # a sweep composes its jobs later
            unknown_keys.check_typed(cfg, cfg.hydra, self.config_loader)
        return cfg

    return patched(Hydra, "compose_config", compose_config)


def listed_without_copies() -> AbstractContextManager[None]:
    """Let Hydra ask its repository of configs directly inside the block, where no override can change the answer.

    Otherwise it copies all configs for each group: `--help` takes a second more, and the tab key does not answer at
    once.
    """
    original: Any = ConfigLoaderImpl.get_group_options

    def get_group_options(
        self: Any,
        group_name: str,
        results_filter: Any = ObjectType.CONFIG,
        config_name: Any = None,
        overrides: Any = (),
    ) -> list[str]:
        if config_name is None and not overrides:
            return list(self.repository.get_group_options(group_name, results_filter))
        return list(original(self, group_name, results_filter, config_name, overrides))

    return patched(ConfigLoaderImpl, "get_group_options", get_group_options)


def saved_without_secrets() -> AbstractContextManager[None]:
    def save_config(cfg: Any, filename: str, output_dir: Path) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / filename).write_text(redact.yaml_text(cfg), encoding="utf-8")

    return patched(utils, "_save_config", save_config)
