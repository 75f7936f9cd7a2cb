"""Refuses an experiment that loses against the main config: Hydra lets the later one of a defaults list win."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.config.checkpoint_config import as_typed, leaves
from ddp_hydra.errors import ConfigError

GROUPS = ("experiment", "hparams_search", "debug")
"""Groups whose options choose and set what belongs to others; a later one wins over those before."""
_OF_A_SWEEP = ("resume", "trainer.pause_after_validations")
"""Keys that a sweep sets in the configs of its jobs."""


def check(cfg: DictConfig, typed: Sequence[str], choices: Mapping[str, Any], repository: Any, main: str) -> None:
    """Refuse an experiment whose choice of a group, or whose value, lost against the main config.

    Args:
        repository: Hydra's config repository, which reads the files of the search path.
    """
    given = [word.lstrip("+~").partition("=")[0] for word in typed]
    chosen: dict[str, tuple[Any, str]] = {}
    values: dict[str, tuple[Any, str]] = {}
    for group in GROUPS:
        for option in _options(choices.get(group)):
            groups, content = read(repository, f"{group}/{option}", "_global_")
            chosen |= {key: (value, f"{group}={option}") for key, value in groups.items()}
            own = dict(leaves(content))
            values = {key: pair for key, pair in values.items() if not any(_meet(key, other) for other in own)}
            values |= {key: (value, f"{group}={option}") for key, value in own.items()}
    lists = read(repository, main)[0] if chosen.keys() - choices.keys() else {}  # Hydra's choices hold no lists
    for key, (value, by) in chosen.items():
        found = choices.get(key, lists.get(key, value))
        if key not in given and _options(found) != _options(value):
            raise ConfigError(
                f"{by} chooses {key}={as_typed(value)}, and `override {key}: {as_typed(found)}` of the main config "
                f"wins over it: move that line into a file of conf/experiment, or type {key}={as_typed(value)}, too"
            )
    set_by_hand = [word for word in given if word not in choices]
    _check_values(cfg, {key: pair for key, pair in values.items() if not any(_meet(key, word) for word in set_by_hand)})


def _check_values(cfg: DictConfig, values: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse values of experiments that differ from the config's, which has types."""
    values = {key: pair for key, pair in values.items() if pair[0] not in ("???", {}) and key not in _OF_A_SWEEP}
    tops = {key.partition(".")[0] for key in values} - {"hydra"}
    part = OmegaConf.masked_copy(cfg, [key for key in cfg if key in tops])
    OmegaConf.set_struct(part, False)
    before: Any = OmegaConf.to_container(part, enum_to_str=True)
    for key, (value, _) in values.items():
        if key.partition(".")[0] in tops:
            with suppress(OmegaConfBaseException):  # a node that is text, as an interpolation is
                OmegaConf.update(part, key, value, merge=True)
    old, new = dict(leaves(before)), dict(leaves(OmegaConf.to_container(part, enum_to_str=True)))  # type: ignore[arg-type]
    for key, (value, by) in values.items():
        if key in new and old.get(key) != new[key]:
            raise ConfigError(
                f"{by} sets {key}={as_typed(value)}, and {as_typed(old.get(key))} of the main config wins over it: "
                f"write `- job`, `- _self_` and `- experiment: …` in this order; or type {key}={as_typed(value)}, too"
            )


def read(repository: Any, path: str, package: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the groups that an option chooses and the values that it sets, with those that it is based on."""
    found = repository.load_config(path)
    if found is None:
        return {}, {}
    own: Any = found.config if found.header.get("package") == package else {}
    groups: dict[str, Any] = {}
    parts: list[Any] = [OmegaConf.create({})]
    is_in = False
    for entry in found.defaults_list:
        is_here = entry.package == "" and hasattr(entry, "group")  # as "base@_here_: images"
        option = f"{entry.group}/{entry.value}" if is_here else getattr(entry, "path", None)
        if entry.is_self():
            parts, is_in = [*parts, own], True
        elif entry.is_override():
            groups[f"{entry.group.lstrip('/')}{f'@{entry.package}' if entry.package else ''}"] = entry.value
        elif isinstance(option, str):
            base = option[1:] if option.startswith("/") else f"{path.rpartition('/')[0]}/{option}".lstrip("/")
            of_base, content = read(repository, base, package)
            groups, parts = groups | of_base, [*parts, content]
        elif is_in:  # the values of a group that follows win over this file's, wherever they are
            own, parts = {}, parts[:1]
    values: Any = OmegaConf.to_container(OmegaConf.merge(*parts, {} if is_in else own))
    return groups, values


def _options(value: Any) -> list[str]:
    if value is None or value == "null":
        return []
    return [value] if isinstance(value, str) else list(value)


def _meet(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
