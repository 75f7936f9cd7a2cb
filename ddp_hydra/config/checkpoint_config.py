"""Converts a job's config to the one that a checkpoint keeps, and back.

A checkpoint keeps interpolations, so that other values can follow a changed key. It does not keep the cluster: a
trained model needs none, and its address or credentials may be secret. Other values whose keys look like a secret are
removed, and have to be given again; interpolations such as ${oc.env:NAME} stay.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import BooleanNode, DictConfig, FloatNode, IntegerNode, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
)

from ddp_hydra.config import hydra_compat, redact, references
from ddp_hydra.config.schema import TOP, base, missing_key, number_types, why_unresolved
from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError

_UNESCAPED = r"(?:(?<!\\)|(?<=(?<!\\)\\\\))"
_OF_THE_JOB = re.compile(
    rf"{_UNESCAPED}\$\{{\s*(?:(?!oc\.)[\w.]+:|oc\.select:hydra,|(?:oc\.(?!env:)[\w.]+:\s*['\"]?)?\.*\[?cluster\b)"
)
"""Matches an interpolation with a resolver that only the job has, such as hydra's and now's, or with the cluster.

`references.with_values_of_hydra` has written hydra's as oc.select's.
"""
_INNER = re.compile(rf"{_UNESCAPED}\$\{{[^{{}}]*\}}")
_KEY = re.compile(r"\$\{\s*(?:[\w.]+:\s*)?([\w.]+)\s*\}")
_OF_THE_COMMAND = {"cluster", "dispatch", "results", "resume", "detach", "faults", "dry_run", "tags"}
"""Keys that a command may change without changing what is trained."""
_LENGTHS = {"trainer.pause_after_validations", "trainer.time_limit_s"}
"""Keys that end a command, but not the run."""
_HOW = ("transform", "transforms", "target_transform", "collate", "shuffle", "shuffle_buffer")
"""Arguments of data sets that say how samples are read, and not which."""
_INSIDE = ("dataset", "datasets", "sets")
"""Arguments of data sets that are data sets."""
_NODES: dict[Any, Any] = {bool: BooleanNode, float: FloatNode, int: IntegerNode}
"""Nodes that turn the text that an interpolation gives into a value of the key's type."""
_NEEDED = ("data", "model", "task", "loss", "metrics")
"""Keys that are needed to load a trained model."""
_FOR_TRAINING = ("optimizer.", "scheduler.", "callbacks.", "sampler.")
"""Groups that no evaluation or prediction reads."""


def stored_config(cfg: DictConfig) -> dict[str, Any]:
    raw = references.without_resolver(OmegaConf.to_container(cfg, enum_to_str=True))
    return dict(redact.without({key: _kept(value, cfg, key) for key, value in raw.items() if key != "cluster"}))


def _kept(raw: Any, parent: Any, key: Any) -> Any:
    # Interpolations that cannot be resolved later are resolved.
    if isinstance(raw, dict):
        return {str(name): _kept(value, parent[key], name) for name, value in raw.items()}
    if isinstance(raw, list):
        return [_kept(value, parent[key], number) for number, value in enumerate(raw)]
    if not isinstance(raw, str) or "${" not in raw:
        return str(raw) if isinstance(raw, Path) else raw  # of a structured config; torch.load reads plain values
    kept = references.with_secret_variables(raw)
    if not _OF_THE_JOB.search(kept):
        return kept
    of_job = list(filter(_OF_THE_JOB.search, _INNER.findall(kept)))
    if any((one := _KEY.fullmatch(text)) and redact.named_secret(one[1]) for text in of_job):  # ${cluster.password}
        return redact.HIDDEN
    with suppress(OmegaConfBaseException):  # of a key that a job needs, the job has said so
        has_secret = "oc.env:" in kept or any(map(redact.named_secret, re.findall(r"[\w.]+", kept)))
        if not of_job or not has_secret:
            return _value(parent, key, kept)
        values = {text: str(_value(parent, key, text)) for text in of_job}
        return _INNER.sub(lambda found: values.get(found[0], found[0]), kept)
    return kept


def _value(parent: Any, key: Any, text: str) -> Any:
    """Return what a text gives in the place of a key, so that it gives the same when it is read again."""
    copied = copy.deepcopy(parent)
    with read_write(copied), open_dict(copied):
        copied[key] = text
    value = copied[key]
    value = OmegaConf.to_container(value, resolve=True, enum_to_str=True) if OmegaConf.is_config(value) else value
    return hydra_compat.escaped(_without_paths(value))


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(_without_paths, value))
    return str(value) if isinstance(value, Path) else value


def composed(
    config: Mapping[str, Any],
    overrides: Sequence[str] = (),
    groups: Mapping[str, Any] | None = None,
    split: str | None = None,
) -> DictConfig:
    """Apply changes to a stored config, and then resolve its interpolations.

    Args:
        split: the only data set that is read, to evaluate or predict it: "train" or "val". The other one is left out
            once the rest is resolved, so that its own values may be missing. "train" is read as validation data are.
    """
    cfg = changed(config, overrides, groups)
    if split == "train":
        _read_as_validation(cfg, overrides)
    without = [f"data.{other}" for other in ("train", "val") if split and other != split]
    raw: Any = OmegaConf.to_container(cfg)
    for secret in redact.hidden({part: raw[part] for part in _NEEDED if part in raw}):
        if not secret.startswith(tuple(f"{key}." for key in without)):
            raise ConfigError(f"{secret} looks like a secret, so no checkpoint keeps it: give {secret}=<value>")
    try:
        resolved = hydra_compat.config_of(_resolved(cfg, without))
    except OmegaConfBaseException as error:
        key, is_missing = missing_key(error), isinstance(error, InterpolationToMissingValueError)
        reason = "it has no value" if is_missing else why_unresolved(error)
        raise ConfigError(f"{key}: {reason}: give {key}=<value>") from error
    OmegaConf.set_struct(resolved, True)
    return resolved


def _read_as_validation(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Give data.train what data.val says of how samples are read, and not which: no augmentation, no mixing."""
    typed = {word.lstrip("+").partition("=")[0] for word in overrides}
    raw: Any = OmegaConf.to_container(cfg.data)
    sets = raw["sets"] if isinstance(raw.get("sets"), dict) else {}  # of a mixture
    of_sets = [(f"data.sets.{name}", cfg.data.sets[name]) for name, one in sets.items() if isinstance(one, dict)]
    for key, node in [("data", cfg.data), *of_sets]:
        own: Any = OmegaConf.to_container(node)
        if "train" in own:
            node.train = _as_validation(cfg, own["train"], own.get("val"), f"{key}.train", typed)


def _as_validation(cfg: DictConfig, train: Any, val: Any, key: str, typed: set[str]) -> Any:
    if isinstance(train, list):
        others: Any = dict(enumerate(val)) if isinstance(val, list) else {}
        return [_as_validation(cfg, one, others.get(i), f"{key}.{i}", typed) for i, one in enumerate(train)]
    if not isinstance(train, dict):
        return train
    is_alike = isinstance(val, dict) and val.get("_target_") == train.get("_target_")
    keys = [name for name in _HOW if not any(f"{word}.".startswith(f"{key}.{name}.") for word in typed)]
    given = [name for name in keys if name in train and OmegaConf.select(cfg, f"{key}.{name}") not in (None, False, 0)]
    if given and not is_alike:
        raise ConfigError(
            f"split=train: {key}.{given[0]} is for training, and no data.val of this class has another one: give "
            f"+{key}.{given[0]}=null or a node with a _target_"
        )
    others = val if is_alike else {}
    kept = {name: value for name, value in train.items() if name not in keys or not is_alike}
    for name in [name for name in kept if name in _INSIDE or "_target_" not in train]:
        kept[name] = _as_validation(cfg, kept[name], others.get(name), f"{key}.{name}", typed)
    return {**kept, **{name: others[name] for name in keys if name in others}}


def changed(
    config: Mapping[str, Any], overrides: Sequence[str] = (), groups: Mapping[str, Any] | None = None
) -> DictConfig:
    cfg = OmegaConf.create({**config, **(groups or {})})
    OmegaConf.set_struct(cfg, True)
    try:
        plain = [word.lstrip("+") for word in overrides if not word.startswith("~")]
        OmegaConf.merge(base(), OmegaConf.from_dotlist(plain))  # types are right
        for word in overrides:
            _refuse_inside_interpolation(cfg, word)
            OmegaConf.set_struct(cfg, not word.startswith(("+", "~")))
            if word.startswith("~"):
                _remove(cfg, word[1:].partition("=")[0])
            else:
                cfg.merge_with_dotlist([word.lstrip("+")])
    except OmegaConfBaseException as error:
        if isinstance(error, ConfigAttributeError | ConfigKeyError) and isinstance(error.parent_node, DictConfig):
            key, known = str(error.full_key), map(str, error.parent_node)
            raise ConfigError(text.unknown(key, known, f"; give one that is new as +{key}=<value>")) from error
        raise ConfigError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from error
    OmegaConf.set_struct(cfg, True)
    _set_types(cfg)
    return cfg


def _set_types(cfg: DictConfig) -> None:
    """Give interpolations the types of their keys, as a job's config has them: `${oc.env:SEED}` gives a text."""
    for key, raw in redact.leaves(OmegaConf.to_container(cfg)):
        if isinstance(raw, str) and "${" in raw and key in number_types():
            group, _, name = key.rpartition(".")
            (OmegaConf.select(cfg, group) if group else cfg)[name] = _NODES[number_types()[key]](raw)


def _refuse_inside_interpolation(cfg: DictConfig, word: str) -> None:
    """Refuse a key of a node that is the interpolation of another one: it would become all of the node."""
    key, _, value = word.lstrip("+").partition("=")
    parts, node = key.split("."), cfg
    if len(parts) == 1 or parts[-1] == "_target_":  # a node of its own begins
        return
    size = 1
    while not (parts[size - 1] in list(node) and OmegaConf.is_interpolation(node, parts[size - 1])):
        node, size = OmegaConf.select(node, parts[size - 1]), size + 1
        if not isinstance(node, DictConfig) or size >= len(parts):
            return
    at = ".".join(parts[:size])
    given = str(dict(references.with_full_names(OmegaConf.to_container(cfg))).get(at))
    there = re.fullmatch(r"\$\{([\w.]+)\}", given)
    instead = f"{there[1]}.{'.'.join(parts[size:])}" if there else ""
    new = "+" if there and OmegaConf.select(cfg, instead, default=cfg, throw_on_missing=False) is cfg else ""
    advice = f"type {new}{instead}={value}" if there else f"type all of it, +{at}={{_target_: …, …}}"
    raise ConfigError(f"{word}: {at} is {given}, so it has no keys of its own: {advice}")


def _remove(cfg: DictConfig, key: str) -> None:
    group, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, group) if group else cfg
    if not isinstance(node, DictConfig) or name not in node:
        raise ConfigError(text.unknown(key, map(str, node) if isinstance(node, DictConfig) else ()))
    del node[name]


def _resolved(node: DictConfig, without: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Return the values of a config with their interpolations resolved; None for the keys of `without`."""
    found: dict[str, Any] = {}
    for key in map(str, node):
        may_lack = prefix.startswith(_FOR_TRAINING) or (prefix or key).partition(".")[0] not in TOP
        if f"{prefix}{key}" in without:
            found[key] = None
        elif OmegaConf.is_missing(node, key):
            found[key] = "???"
        elif may_lack and not _has_value(node, key):
            found[key] = "???"  # such as ${oc.env:RATE}, on a machine without this variable
        elif isinstance(value := node[key], DictConfig):
            found[key] = _resolved(value, without, f"{prefix}{key}.")
        else:
            found[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return found


def _has_value(node: DictConfig, key: str) -> bool:
    try:
        OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value := node[key]) else value
    except OmegaConfBaseException:
        return False
    return True


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each difference between two stored configs: "optimizer.lr 0.1 -> 0.01".

    A key of the user's own, as `paths.output`, makes one only if something reads it.
    """
    old, new = dict(redact.leaves(before)), dict(redact.leaves(now))
    keys = [key for key in {**old, **new} if key.partition(".")[0] not in _OF_THE_COMMAND and key not in _LENGTHS]
    # A later version may refer to the same keys by other names.
    named = [dict(references.with_full_names(config)) for config in (before, now)]
    both = {key: [config.get(key, {}) for config in named] for key in keys}
    # No NaN equals another.
    differing = [key for key, (then, now) in both.items() if then != now and repr(then) != repr(now)]
    own = [key for key in differing if key.partition(".")[0] not in TOP]
    unread = [key for key in own if not any(references.is_read(key, config) for config in (before, now))]
    return [
        f"{key} {' -> '.join(as_typed(one[key]) if key in one else '(missing)' for one in (old, new))}"
        for key in differing
        if key not in unread
    ]


def as_typed(value: Any) -> str:
    if isinstance(value, list | tuple | ListConfig):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return "{…}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(getattr(value, "name", value))  # of an enum, its name
