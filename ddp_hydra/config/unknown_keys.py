"""Refuses unknown keys and values of a wrong kind; warns of keys that nothing reads; the messages name known keys."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ValidationError

from ddp_hydra.config import experiments
from ddp_hydra.config.checkpoint_config import leaves
from ddp_hydra.config.schema import SCHEMAS, Config, allowed
from ddp_hydra.errors import ConfigError

log = logging.getLogger(__name__)
_MERGING = "Error merging override "
OUR_DATA_KEYS = ("name", "batch_size", "train", "val", "prefetch", "memory_mb", "workers")


def check(cfg: DictConfig) -> None:
    """Refuse keys that no schema has: Hydra accepts them after `+`.

    Raises:
        ConfigError: with the key that may be meant, and the known keys.
    """
    raw = OmegaConf.to_container(cfg)
    assert isinstance(raw, dict)
    read = set(_interpolated(raw, ()))
    for prefix, node, schema in [("", cfg, Config), *((f"{name}.", cfg[name], SCHEMAS[name]) for name in SCHEMAS)]:
        known = [field.name for field in fields(schema)]  # type: ignore[arg-type]
        for key in node:
            if str(key) not in known and not _is_read(f"{prefix}{key}", read):
                raise ConfigError(unknown(f"{prefix}{key}", known))
    for key, value in (raw.get("metrics") or {}).items():
        if not isinstance(value, dict) or "_target_" not in value:
            raise ConfigError(f"metrics.{key}={value}: a metric is a node with a _target_, as in conf/metrics")


def _interpolated(node: Any, place: tuple[str, ...]) -> Iterator[str]:
    """Yield the words inside all interpolations, with the full names of the keys that other values refer to."""
    if isinstance(node, str):
        for word in re.findall(r"[\w.\[\]-]+", node) if "${" in node else ():
            name = word.replace("[", ".").replace("]", "")
            dots = len(name) - len(name.lstrip(".")) if word.startswith(".") else 0
            yield ".".join([*place[: len(place) - dots], name[dots:]]) if dots else name
    elif isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _interpolated(value, (*place, str(key)))


def _is_read(key: str, words: Iterable[str]) -> bool:
    """Return whether an interpolation refers to a key: to itself, to a node around it, or to a part of it.

    Args:
        key: its full name, "trainer.seed".
        words: from `_interpolated`; one that ends with a dot goes on with the value of another interpolation.
    """
    return any(
        key == word or f"{key}.".startswith(f"{word.rstrip('.')}.") or word.startswith(f"{key}.") for word in words
    )


def unknown(key: str, known: Iterable[str], more: str = "") -> str:
    group, _, name = key.rpartition(".")
    names = [one for one in known if not one.startswith("_") and one != "hydra"]
    there = f"the keys of {group} are" if group else "the groups and keys are"
    hint = meant(name, names, f"{group}." if group else "")
    return f"{key}: there is no such key{hint}; {there} {', '.join(names)}{more}"


def explain(error: BaseException) -> str | None:
    """Return a sentence for Hydra's error about an unknown key, or a value of a wrong type; None for another error."""
    typed, cause = str(error), error.__cause__
    if isinstance(cause, ValidationError) and (given := allowed(str(cause.full_key))):
        where = typed.removeprefix(_MERGING) if typed.startswith(_MERGING) else f"{cause.full_key}: {cause.msg}"
        return f"{where}: give {given}"
    if not isinstance(cause, ConfigAttributeError | ConfigKeyError) or not isinstance(cause.parent_node, DictConfig):
        return None
    key, node = str(cause.full_key), cause.parent_node
    more = ""
    if "_target_" in node:
        more = f"; another argument of {node['_target_']} is given with +{key}=<value>"
    return unknown(key, map(str, node), more)


def meant(word: str, words: Iterable[str], prefix: str = "") -> str:
    """Return ": did you mean …?" if a word is a misspelling or the initials of one of `words`, or the reverse."""
    names = list(words)
    short = [name for name in names if name == _initials(word) or _initials(name) == word]
    near = difflib.get_close_matches(word, names, 1, 0.7) or (short if len(word) > 1 else [])
    return f": did you mean {prefix}{near[0]}?" if near else ""


def _initials(name: str) -> str:
    return "".join(part[0] for part in name.split("_") if part)


def check_typed(cfg: DictConfig, hydra_cfg: Any, loader: Any) -> None:
    """Refuse texts where the group's own file has a number or a boolean, and experiments that lose; warn of new keys.

    Args:
        hydra_cfg: Hydra's own part of the config, which has the typed words.
        loader: Hydra's, which reads the files of the search path; None if it is not known.

    Raises:
        ConfigError: with the value in the group's file.
    """
    typed, repository = hydra_cfg.overrides.task, getattr(loader, "repository", None)
    if new := [word.partition("=")[0].lstrip("+") for word in typed if word.startswith("+")]:
        _warn_of_unread(cfg, new)
    if repository is not None:
        experiments.check(cfg, typed, hydra_cfg.runtime.choices, repository, hydra_cfg.job.config_name or "config")
        check_texts(cfg, typed, hydra_cfg.runtime.choices, repository)


def check_texts(cfg: DictConfig, typed: Iterable[str], choices: Mapping[str, Any], repository: Any) -> None:
    """Refuse typed words that give a text where the group's own file has a number or a boolean."""
    for word in typed:
        key = word.partition("=")[0].lstrip("+")
        group, _, name = key.partition(".")
        # a cluster's number may become a text: memory_limit=4GB
        if not name or group in SCHEMAS or group == "cluster" or not choices.get(group):
            continue
        usual = dict(leaves(experiments.read(repository, f"{group}/{choices[group]}")[1])).get(name)
        # Only the job knows what ${hydra:runtime.output_dir} and the like are.
        if not isinstance(usual, bool | int | float) or "${" in word:
            continue
        if isinstance(value := OmegaConf.select(cfg, key, throw_on_missing=False), str):
            kind = "true or false" if isinstance(usual, bool) else "a number"
            raise ConfigError(f"{key}={value}: give {kind}; {group}={choices[group]} has {str(usual).lower()}")


def _warn_of_unread(cfg: DictConfig, new: Iterable[str]) -> None:
    """Warn of new keys that are neither arguments of a `_target_` nor used by an interpolation."""
    read = set(_interpolated(OmegaConf.to_container(cfg), ()))
    for key in new:
        group, _, name = key.partition(".")
        node = cfg.get(group) if name and "." not in name and group not in SCHEMAS else None
        if not isinstance(node, DictConfig) or "_target_" in node or name in OUR_DATA_KEYS or _is_read(key, read):
            continue
        if not isinstance(node.get(name), DictConfig):
            others = [str(other) for other in node if other != name]
            log.warning("%s: nothing reads it%s", key, meant(name, others, f"{group}."))
