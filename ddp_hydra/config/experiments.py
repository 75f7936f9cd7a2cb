"""Refuses an experiment that loses against the main config, where that is later in the list of defaults.

Hydra lets the later one win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.config import redact
from ddp_hydra.config.checkpoint_config import as_typed
from ddp_hydra.config.hydra_compat import typed_words
from ddp_hydra.config.references import meet
from ddp_hydra.config.schema import TOP
from ddp_hydra.console.text import listed
from ddp_hydra.errors import ConfigError

GROUPS = ("experiment", "hparams_search", "debug")
"""Groups whose options choose and set what belongs to others; a later one wins over those before."""
_OF_A_SWEEP = ("resume", "trainer.pause_after_validations")
"""Keys that a sweep sets in the configs of its jobs."""
_MAIN, _OTHER = "", "other"
"""What a config belongs to: the main config, or a group of the user's own; else an experiment, `experiment=mine`."""


def check(cfg: DictConfig, hydra_cfg: Any, loader: Any) -> None:
    """Refuse an experiment whose choice of a group, or whose value, lost against the main config.

    Hydra's own list of defaults says what wins. To compute it takes a fifth of a composition, so a main config that
    names its experiments last, and can't win, is not asked. What else wins, as a group of the user's own, is right.
    """
    typed, name = typed_words(hydra_cfg), hydra_cfg.job.config_name or "config"
    found = loader.repository.load_config(name)
    listed = [] if found is None else found.defaults_list
    if not _is_chosen(hydra_cfg.runtime.choices, typed, listed) or _names_experiments_last(listed):
        return
    found = loader.compute_defaults_list(name, [*typed, *hydra_cfg.overrides.hydra], RunMode.RUN)
    entries = list(_entries(found.defaults_tree))
    chosen: dict[str, tuple[Any, str]] = {}
    values: dict[str, tuple[Any, str]] = {}
    lost: dict[str, tuple[Any, str]] = {}
    for node, by in entries:
        is_of_experiment = by not in (_MAIN, _OTHER)
        if not values and not is_of_experiment:
            continue
        config, package = loader.repository.load_config(node.get_config_path()), node.get_final_package()
        if config is None:  # of a place that the main config adds: only Hydra knows what it sets
            values, lost = {}, {}
            continue
        own = dict(redact.leaves(OmegaConf.to_container(config.config), f"{package}." if package else ""))
        met = {key: pair for key, pair in values.items() if any(meet(key, other) for other in own)}
        if by == _MAIN:
            lost |= met
            continue
        values, lost = ({key: pair for key, pair in one.items() if key not in met} for one in (values, lost))
        if is_of_experiment:
            values |= {key: (value, by) for key, value in own.items()}
            for entry in config.defaults_list:
                if entry.is_override():
                    entry.update_parent(node.get_group_path(), package)
                    chosen[entry.get_override_key()] = entry.value, by
    of_main = {node.get_config_path() for node, by in entries if by == _MAIN}
    for key, (value, by) in chosen.items():
        winner, wins = found.overrides.override_metadata[key], found.overrides.override_choices[key]
        if winner.containing_config_path in of_main and _options(wins) != _options(value):
            raise ConfigError(
                f"{by} chooses {key}={as_typed(value)}, and `override {key}: {as_typed(wins)}` of the main config "
                f"wins over it: move that line into a file of conf/experiment, or type {key}={as_typed(value)}, too"
            )
    given = [word.lstrip("+~").partition("=")[0] for word in typed]
    set_by_hand = [word for word in given if word not in hydra_cfg.runtime.choices]
    _check_values(cfg, {key: pair for key, pair in lost.items() if not any(meet(key, word) for word in set_by_hand)})


def _is_chosen(choices: Mapping[Any, Any], typed: Sequence[str], listed: Sequence[Any]) -> bool:
    """Return whether an experiment is chosen. Hydra's choices hold no lists of options, and no paths."""
    lists = tuple(f"{group}=[" for group in GROUPS)
    is_in_choices = any(option for group, option in choices.items() if str(group).partition("@")[0] in GROUPS)
    is_typed = any(word.lstrip("+").startswith(lists) for word in typed)
    others = (entry for entry in listed if not isinstance(getattr(entry, "value", ()), str | None))
    return is_in_choices or is_typed or not {*GROUPS}.isdisjoint(map(_group_of, others))


def _group_of(entry: Any) -> str:
    """Return the group of an entry of a list of defaults, also of `experiment/mine`."""
    path = str(getattr(entry, "path", "")).lstrip("/")
    return str(getattr(entry, "group", path.partition("/")[0])).lstrip("/")


def _names_experiments_last(entries: Sequence[Any]) -> bool:
    """Return whether only other experiments follow the first one in the list of defaults of a main config."""
    groups = [_group_of(entry) for entry in entries if not entry.is_override()]
    first = next((number for number, group in enumerate(groups) if group in GROUPS), len(groups))
    has_self = any(entry.is_self() for entry in entries)
    return has_self and first < len(entries) and {*groups[first:]} <= {*GROUPS} and len(groups) == len(entries)


def _entries(tree: Any, by: str = _MAIN) -> Iterator[tuple[Any, str]]:
    """Yield the configs of Hydra's tree of defaults, in the order in which they are merged, and what each belongs to.

    What the main config chooses of a group that the framework reads belongs to it.
    """
    node, children = (tree.node, tree.children) if hasattr(tree, "children") else (tree, None)
    if node.is_virtual():
        for child in children or ():
            yield from _entries(child, by)
    elif node.get_name() is not None and not node.is_deleted() and not node.is_missing():
        group, _, option = node.get_config_path().partition("/")
        if by == _MAIN and option and not node.primary:
            is_main = group in TOP and not node.is_external_append()
            by = f"{group}={option}" if group in GROUPS else _MAIN if is_main else _OTHER
        for child in children or [node]:
            if child is node or (not hasattr(child, "children") and child.is_self()):
                yield node, by
            else:
                yield from _entries(child, by)


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
    old, new = dict(redact.leaves(before)), dict(redact.leaves(OmegaConf.to_container(part, enum_to_str=True)))
    for key, (value, by) in values.items():
        if key in new and old.get(key) != new[key]:
            ours, theirs = (redact.without([f"{key}={as_typed(one)}"])[0] for one in (value, old.get(key)))
            raise ConfigError(
                f"{by} sets {ours}, and {theirs.partition('=')[2]} of the main config wins over it: "
                f"write `- job`, `- _self_` and `- experiment: …` in this order; or type {ours}, too"
            )


def _options(value: Any) -> list[str]:
    return [] if value == "null" else listed(value)
