"""Composes a config of the typed words: Hydra finds our plugins, and the configs of a project and the starter.

Words are translated first: `resume=<run>` adds the words of the run.
Inside the command Hydra composes once, checks what it has composed, lists options quickly, and saves no secrets.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core import utils
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig

from ddp_hydra.cli.resumed import resumed_run, typed_elsewhere, with_one_run, with_resumed_overrides, with_resumed_sweep
from ddp_hydra.cli.words import MODES, ONE_RUN, SWEEP, SWEEPS, is_sweep, key_of
from ddp_hydra.config import project, references, schema, unknown_keys
from ddp_hydra.config.checkpoint_config import as_typed
from ddp_hydra.config.hydra_compat import CONFIG_DIR, IS_1_3, VERSION_BASE, outside_of_app, parse_override, typed_words
from ddp_hydra.console import text
from ddp_hydra.console.signals import held_back
from ddp_hydra.errors import CheckpointError, ConfigError, DdpHydraError
from ddp_hydra.job.run_dir import HYDRA, has_record, hold, remove_unused
from ddp_hydra.rank import torchrun
from ddp_hydra.storage.manifest import find_checkpoint

AFTER = "ddp_hydra"
"""What Hydra's list of sources calls a layer of the project space behind the first."""


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
            search_path.prepend(CONFIG_DIR, f"file://{folder}", anchor="main")
        for folder in self.after:
            search_path.append(AFTER, f"file://{folder}")


@contextmanager
def layered(config_dir: str | None = None) -> Iterator[Path]:
    """Let Hydra find the configs of all layers inside the block; `config_dir` wins, which Hydra would put last."""
    Plugins.instance().register(LayerConfigs)
    main, *after = [root / "conf" for root in project.layers() if (root / "conf").is_dir()]
    LayerConfigs.before, LayerConfigs.after = (Path(config_dir).absolute(),) if config_dir else (), tuple(after)
    original: Any = ConfigRepository.initialize_sources

    def initialize_sources(self: Any, search_path: ConfigSearchPath) -> None:
        # Hydra adds `hydra.searchpath` last, and asserts that the schemas stay behind it.
        sources = search_path.get_path()
        sources[:] = sorted(sources, key=lambda source: (source.provider == "schema", source.provider == AFTER))
        original(self, search_path)

    try:
        with patched(ConfigRepository, "initialize_sources", initialize_sources):
            yield main
    finally:
        LayerConfigs.before = LayerConfigs.after = ()


_composing = threading.Lock()
"""Hydra composes one config of a process at a time."""


@held_back()
def compose(words: Sequence[str]) -> DictConfig:
    """Return a config with Hydra's own part, composed in this process as Hydra does it for the command.

    Args:
        words: overrides, and maybe `--config-name=<name>` and `--config-dir=<folder>`.
    """
    options = [word for word in words if word.startswith("--config-")]
    given = get_args_parser().parse_args(options)
    overrides = [word for word in words if word not in options]
    project.make_importable(project.layers())
    schema.register()
    with (
        _composing,
        outside_of_app(),
        layered(given.config_dir) as folder,
        initialize_config_dir(str(folder), job_name="ddp_hydra", **VERSION_BASE),
    ):
        try:
            cfg: DictConfig = hydra_compose(given.config_name or "config", overrides, return_hydra_config=True)
            unknown_keys.check_typed(cfg, cfg.hydra, GlobalHydra.instance().config_loader())
        except Exception as error:
            if isinstance(error, DdpHydraError) or (said := unknown_keys.explain(error, can_sweep=False)) is None:
                raise
            raise ConfigError(said + typed_elsewhere(error, words)) from error
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
    word = "hydra.mode=MULTIRUN" if multirun else ONE_RUN
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
        elif mode == wanted:
            kept[config_name, tuple(overrides)] = cfg
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
        if (folder := cfg.hydra.output_subdir) != HYDRA:
            raise ConfigError(f"hydra.output_subdir={as_typed(folder)}: resume=<run> reads {HYDRA}: leave it out")
        if run_mode is RunMode.RUN:  # a sweep composes its jobs later
            unknown_keys.check_typed(cfg, cfg.hydra, self.config_loader)
        else:
            _refuse_swept_resume(cfg.hydra)
        return cfg

    return patched(Hydra, "compose_config", compose_config)


def _refuse_swept_resume(hydra_cfg: Any) -> None:
    """Refuse runs that a sweep would resume without the words that each was typed with."""
    swept = [*(hydra_cfg.sweeper.get("params") or ()), *filter(is_sweep, typed_words(hydra_cfg))]
    if "resume" in map(key_of, swept):
        said = "resume can't be swept: each run goes on with the words that it was typed with"
        raise ConfigError(f"{said}: type a command for each, with resume=<run>")


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
        if output_dir.name == HYDRA and has_record(output_dir.parent):
            content = references.saved_text(cfg).encode()
            hold(output_dir.parent, {f"{HYDRA}/{filename}": content})
            return
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / filename).write_text(references.saved_text(cfg), encoding="utf-8")
        except OSError as error:
            error.filename = error.filename or str(output_dir / filename)
            remove_unused(output_dir.parent, output_dir.name)
            raise

    return patched(utils, "_save_config", save_config)


def read_words(arguments: list[str]) -> list[str]:
    typed = with_search([with_weights(quoted_path(word)) for word in with_options_first(with_joined_values(arguments))])
    words = with_one_run(with_resumed_overrides(typed), typed) if resumed_run(typed) else typed
    if SWEEPS & set(words):
        words = with_resumed_sweep(words)
    return with_options_first(with_run_dir_before(with_faults(with_params(words))))


def with_joined_values(arguments: list[str]) -> list[str]:
    """Join options and their values, `--config-dir a=b`, which would be taken for overrides, and write them long."""
    short = {"-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path", "-i": "--info"}
    words: list[str] = []
    for word in arguments:
        option, equals, value = word.partition("=")
        is_override = bool(equals) or word.startswith("~")
        takes_value = words and words[-1] in short.values() and not (words[-1] == "--info" and is_override)
        if takes_value and not word.startswith("-"):
            words[-1] += f"={word}"
        else:
            words.append(f"{short.get(option, option)}{equals}{value}")
    return ["--info=all" if word == "--info" else word for word in words]  # else argparse takes an override for it


def with_options_first(arguments: list[str]) -> list[str]:
    """Put options before overrides, because argparse takes no override behind `-m` or `--cfg job` that follows one."""
    return sorted(arguments, key=lambda word: not word.startswith("-") and ("=" in word or word.startswith("~")))


def quoted_path(word: str) -> str:
    """Quote a value that is the path of a file or folder, where Hydra would read it otherwise: resume=runs/lr=0.1."""
    key, _, value = word.partition("=")
    return f"{key}={text.quoted(value)}" if os.path.lexists(value) else word


def with_weights(word: str) -> str:
    """Let `model.weights` be typed for any model, also one without such a key."""
    return f"++{word}" if word.startswith("model.weights=") else word


def with_search(arguments: list[str]) -> list[str]:
    """Add `-m` to `hparams_search=<name>`: in Hydra 1.4 a config of a group cannot switch to multirun."""
    modes = MODES & {key_of(word) for word in arguments}
    names = [word.partition("=")[2] for word in arguments if key_of(word) == "hparams_search"]
    return arguments if modes or set(names) <= {"", "null"} else [*arguments, SWEEP]


def with_run_dir_before(arguments: list[str]) -> list[str]:
    run_dir = None if SWEEPS & set(arguments) else torchrun.remembered()
    if run_dir is None:
        return arguments
    quoted = text.quoted(str(run_dir))
    kept = [word for word in arguments if not word.startswith("hydra.run.dir=")]
    with suppress(CheckpointError):
        find_checkpoint(run_dir)
        kept = [*(word for word in kept if not word.startswith("resume=")), f"resume={quoted}"]
    return [*kept, f"hydra.run.dir={quoted}"]


def with_params(arguments: list[str]) -> list[str]:
    """Give sweepers `hydra.sweeper.params={optimizer.lr: '0.1,0.01'}` as `optimizer.lr=0.1,0.01`, which is the same.

    Hydra reads such a dict from a file only.
    """
    words: list[str] = []
    for word in arguments:
        if key_of(word) != "hydra.sweeper.params":
            words.append(word)
            continue
        found = parse_override(word).value()
        if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
            raise ConfigError(f"{word}: give {{optimizer.lr: '0.1,0.01'}}, or type optimizer.lr=0.1,0.01")
        words += [f"{key}={value}" for key, value in found.items()]
    return words


def with_faults(arguments: list[str]) -> list[str]:
    """Quote `+fault=kill,rank=1,step=20`, because Hydra reads commas as a sweep."""
    given = [word for word in arguments if word.startswith(("+fault=", "fault="))]
    if not given:
        return arguments
    texts = [re.sub("['\"]", "", word.partition("=")[2]) for word in given]
    quoted = ",".join(f"'{text}'" for text in texts)
    return [word for word in arguments if word not in given] + [f"faults=[{quoted}]"]
