"""Composes the configs of a sweep's jobs: once each, and from the config of another job where only values differ.

Hydra reads and merges all config files for each job, which takes 0.2 s. Most jobs of a sweep differ in plain values
only (`optimizer.lr=0.1`), which Hydra sets after it has merged the files.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Container, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.config import hydra_compat
from ddp_hydra.config.hydra_compat import parse_override
from ddp_hydra.sweep.rows import comparable

CHECKED = 64
"""Number of jobs of a sweep that are composed and checked before the first one starts. Of later jobs, only those are
that have a new override whose value is not a number."""
TEMPLATES = 16
"""Number of configs that are kept to derive others from."""
_PLAIN = re.compile(r"(?P<key>[A-Za-z_]\w*(\.\w+)*)=(?P<value>[\w.+-]+)")
"""An override that sets a key to a number or a word."""


class CachingConfigLoader:
    """Caches the configs that Hydra's loader composes.

    Sweepers compose each job to check it, and launchers compose it again to run it.

    Args:
        loader: the loader of Hydra.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.composed: dict[tuple[str, ...], DictConfig] = {}
        self.checked: set[str] = set()
        self.last: DictConfig | None = None
        self.templates: dict[tuple[str, ...], Template] = {}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose a job for a sweeper, which only checks that it can be composed, and cache its config."""
        texts = {word for word in sweep_overrides if isinstance(comparable(word.partition("=")[2]), str)}
        new = texts - self.checked
        if self.last is not None and len(self.composed) >= CHECKED and not new:
            return self.last
        self.checked |= new
        self.last = self.compose(master_config, sweep_overrides)
        if len(self.composed) < CHECKED:
            self.composed[tuple(sweep_overrides)] = self.last
        return self.last

    def take(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """Return a job's config, composed if needed, and remove it from the cache: the caller may change it."""
        config = self.composed.pop(tuple(sweep_overrides), None)
        return config or self.compose(master_config, sweep_overrides)

    def compose(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """Compose a job, from the config of another one if that is the same but for plain values."""
        shape = shape_of(sweep_overrides, groups_of(master_config))
        template = self.templates.get(shape)
        config = template.derive(master_config, sweep_overrides) if template else None
        if config is not None:
            return config
        config = self.loader.load_sweep_config(master_config, list(sweep_overrides))
        if template is None and len(self.templates) < TEMPLATES:
            with contextlib.suppress(Exception):  # a class of another app that cannot be pickled
                self.templates[shape] = Template(config, sweep_overrides)
        return config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Template:
    """Derives the configs of jobs from the config of one. It is kept pickled, of which a copy takes least time.

    Args:
        config: of that job, with Hydra's own part.
        overrides: of that job.
    """

    def __init__(self, config: DictConfig, overrides: Sequence[str]) -> None:
        self.pickled, self.overrides = pickle.dumps(config), tuple(overrides)

    def derive(self, master_config: DictConfig, overrides: Sequence[str]) -> DictConfig | None:
        """Return the config of another job.

        Args:
            master_config: of the sweep.
            overrides: of the job; of the same shape.

        Returns:
            The config that Hydra would compose; None where only Hydra can tell.
        """
        others = [parse_override(word) for word in overrides]
        changed = {old: parse_override(new) for old, new in zip(self.overrides, overrides, strict=True) if old != new}
        config: DictConfig = pickle.loads(self.pickled)  # noqa: S301 (by this very process)
        if not all(is_value(config, override, others) for override in changed.values()):
            return None
        try:
            for override in changed.values():
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:  # Hydra has a message for it
            return None
        task = config.hydra.overrides.task
        for number, word in enumerate(task):
            if word in changed:
                task[number] = changed[word].input_line
        hydra_compat.name_overrides(config, [parse_override(word) for word in task])
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config


class QuickCopy(DictConfig):
    """A config that is copied by pickling, which takes less than half the time of OmegaConf's own way."""

    def __deepcopy__(self, memo: dict[int, Any]) -> QuickCopy:
        parent, self.__dict__["_parent"] = self.__dict__["_parent"], None
        try:
            copied: QuickCopy = pickle.loads(pickle.dumps(self))  # noqa: S301 (by this very process)
        finally:
            self.__dict__["_parent"] = parent
        copied.__dict__["_parent"] = parent
        return copied


def copy_quickly(config: DictConfig) -> None:
    """Let Hydra copy a job's config quickly: it does so five times before the job begins."""
    for node in (config, config.hydra):
        object.__setattr__(node, "__class__", QuickCopy)


def is_value(config: DictConfig, override: Override, others: Sequence[Override]) -> bool:
    """Return whether an override does nothing but set one value, and no other one touches that."""
    groups, key = groups_of(config), override.key_or_group
    if key in groups or key.partition(".")[0] == "hydra":
        return False
    node = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
    if not isinstance(node, DictConfig) or key.rpartition(".")[2] not in node:
        return False
    if OmegaConf.is_config(node._get_node(key.rpartition(".")[2])):
        return False
    return not any(
        other is not override
        and (other.key_or_group not in groups or isinstance(other.value(), dict))
        and is_within(*sorted((key, other.key_or_group), key=len))
        for other in others
    )


def groups_of(config: DictConfig) -> Container[str]:
    """Return the groups that a config has chosen from."""
    groups: Container[str] = OmegaConf.select(config, "hydra.runtime.choices", default=())
    return groups


def shape_of(overrides: Sequence[str], groups: Container[str]) -> tuple[str, ...]:
    """Return the overrides without the numbers and words that keys are set to, unless those are Hydra's.

    Args:
        overrides: of a job.
        groups: names of config groups, whose words choose files.
    """

    def shape(word: str) -> str:
        plain = _PLAIN.fullmatch(word)
        return f"{plain['key']}=" if plain and plain["key"] not in groups and not word.startswith("hydra.") else word

    return tuple(map(shape, overrides))


def is_within(outer: str, inner: str) -> bool:
    """Return whether a key is another one, or in it."""
    return inner == outer or inner.startswith(f"{outer}.")
