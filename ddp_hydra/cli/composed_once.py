"""Compose the config of a job once.

To find out whether a command line is a sweep (`hydra.mode`), Hydra 1.3 composes all of the config, throws it away, and
composes it again. That is a good part of the time to the first step of a job whose fork server is warm.
Hydra 1.4 finds it without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.types import RunMode
from omegaconf import DictConfig

from ddp_hydra.config.hydra_compat import IS_1_3


@contextmanager
def composed_once(multirun: bool) -> Iterator[None]:
    """Let Hydra use, inside the block, the config from which it has read the mode.

    Args:
        multirun: the command line has -m.
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

    ConfigLoaderImpl.load_configuration = load_configuration  # type: ignore[method-assign]
    Hydra.get_mode = get_mode  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]
        Hydra.get_mode = find_mode  # type: ignore[method-assign]
