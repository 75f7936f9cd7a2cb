"""Tells which keys the interpolations of a config refer to; has the resolver `of_set` of our own options.

A job of a program gets the values of `${hydra:…}` here: Hydra's resolver reads what all threads of a process share.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from ddp_hydra.config import redact
from ddp_hydra.config.hydra_compat import IS_1_3

_INTERPOLATION = re.compile(r"\$\{[^{}]*\}")
_OF_SET = re.compile(r"\$\{of_set:\s*([\w-]+)\s*\}")
_RELATIVE = re.compile(r"\bof_set:\s*([\w-]+)|(?<![\w.\[\]-])(\.+)(?=[\w\[])")
"""Matches a key of the resolver, or the dots before a relative key."""
_OF_HYDRA = re.compile(r"(?<!\\)\$\{\s*hydra:\s*(['\"]?)")
"""Matches the begin of an interpolation with Hydra's resolver, up to the name of the key."""
_KEY_OF_HYDRA = re.compile(r"(?<!\\)\$\{\s*hydra:\s*([\w.]+)\s*\}")
"""Matches a whole one, whose key has no interpolation."""
_OF_ENV = re.compile(r"(?<!\\)\$\{\s*oc\.env\s*:\s*['\"]?(\w+)['\"]?\s*(?:,[^{}]*)?\}")
_OF_ENV_SET = re.compile(r"(?<!\\)\$\{\s*hydra:\s*job\.env_set\.(\w+)\s*\}")


def _of_set(key: str, *, _parent_: Any) -> Any:
    """Return the value of a key of the data set that a node belongs to: `${of_set:image_size}`.

    It is in the closest node around that has it and is not itself built (`_target_`), or else in `data`. So the options
    of conf/transform and data/base/image_set fit anywhere in `data`, and in each set of a mixture.
    """
    around = [_parent_]
    while (node := around[-1]._get_parent()) is not None:
        around.append(node)
    nodes = (node for node in around[1:-1] if isinstance(node, DictConfig) and "_target_" not in node)
    found = next((node for node in nodes if key in list(node)), OmegaConf.select(around[-1], "data"))
    if not isinstance(found, DictConfig) or key not in list(found):
        raise InterpolationKeyError(f"Interpolation key 'data.{key}' not found")
    try:
        return found[key]
    except MissingMandatoryValue as error:
        raise InterpolationToMissingValueError(f"Missing mandatory value: {error.full_key}") from None


if not OmegaConf.has_resolver("of_set"):  # this process may have taken over the state of another one
    _register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    _register("of_set", _of_set)


def saved_text(config: Any) -> str:
    """Return a config as OmegaConf writes it, without its secrets. It can be resolved without our own resolver."""
    return redact.yaml_text(without_resolver(OmegaConf.to_container(config, enum_to_str=True)))


def without_resolver(content: Any) -> Any:
    """Return a config of dicts, lists and values with the full names of keys in place of `of_set`."""
    known = _keys(content) if isinstance(content, dict) else set()

    def plain(value: Any, path: list[str]) -> Any:
        if isinstance(value, dict):
            return {key: plain(one, [*path, str(key)]) for key, one in value.items()}
        if isinstance(value, list):
            return [plain(one, [*path, str(number)]) for number, one in enumerate(value)]
        if isinstance(value, str) and "of_set:" in value:
            return _OF_SET.sub(lambda found: f"${{{_found(found[1], path[:-1], known)}}}", value)
        return value

    return plain(content, [])


def _keys(config: Any) -> set[str]:
    keys = [key.split(".") for key, _ in redact.values_of(config)]
    return {".".join(parts[:end]) for parts in keys for end in range(1, len(parts) + 1)}


def _found(name: str, around: list[str], known: set[str]) -> str:
    """Return the full name of the key that `of_set` takes for a value inside the groups `around`."""
    groups = (".".join(around[:end]) for end in range(len(around) - 1, 0, -1))
    having = (one for one in groups if f"{one}.{name}" in known and f"{one}._target_" not in known)
    return f"{next(having, 'data')}.{name}"


def with_own_hydra(cfg: DictConfig) -> DictConfig:
    """Return a copy of a config with Hydra's part, where `${hydra:…}` reads that part of the copy."""
    copied, written = copy.deepcopy(cfg), OmegaConf.to_container(cfg)
    for path in _of_hydra(written):
        parent = _node(copied, path[:-1])
        with read_write(parent), open_dict(parent):
            parent[path[-1]] = _OF_HYDRA.sub(r"${oc.select:\1hydra.", _node(written, path))
    return copied


def with_values_of_hydra(cfg: DictConfig, whole: DictConfig) -> DictConfig:
    """Return a copy of a config without Hydra's part, where the values of `whole` are in place of `${hydra:…}`.

    Other interpolations stay, because their values may be secrets: a text with such ones gets `${oc.select:hydra,…}`,
    whose default is the value.

    Args:
        whole: the same config, as `with_own_hydra` returns it.
    """
    copied, written = copy.deepcopy(cfg), OmegaConf.to_container(whole)
    for path in _of_hydra(raw := OmegaConf.to_container(cfg)):
        parent = _node(copied, path[:-1])
        try:
            text = with_secret_variables(_node(raw, path), whole)
            others = _KEY_OF_HYDRA.sub("", text)
            if "${" in others and not _OF_HYDRA.search(others):
                value = _KEY_OF_HYDRA.sub(lambda found: _literal(OmegaConf.select(whole, f"hydra.{found[1]}")), text)
            else:
                value = _node(whole, path)
        except OmegaConfBaseException:  # the job says so, if it needs it
            value = _node(written, path)
        with read_write(parent), open_dict(parent):
            parent[path[-1]] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return copied


def with_secret_variables(text: str, whole: DictConfig | None = None) -> str:
    """Return a text with `${oc.env:NAME}` for a variable that Hydra has set and that may be a secret.

    One that has its value from other variables is replaced by the interpolations that it is made of.

    Args:
        whole: a config with Hydra's part, whose variables this process may have with other values.
    """
    config: Any = whole if whole is not None else HydraConfig.instance().cfg
    given = config and OmegaConf.select(config, "hydra.job.env_set")
    variables: Any = OmegaConf.to_container(given) if given else {}

    def named(found: re.Match[str]) -> str:
        name, here = found[1], os.environ.get(found[1])
        written = str(variables.get(name))
        others = _OF_ENV.findall(written)
        if others and "${" not in _OF_ENV.sub("", written) and variables.keys().isdisjoint(others):
            return written
        is_same = whole is None or here == str(OmegaConf.select(whole, f"hydra.job.env_set.{name}"))
        is_secret = here is not None and is_same and redact.named_secret(name)
        return f"${{oc.env:{name}}}" if is_secret else found[0]

    return _OF_ENV_SET.sub(named, text)


def secret_variables(cfg: DictConfig) -> set[str]:
    """Return the names of the variables that may be secrets and that a config reads in Hydra's part."""
    texts = (value for _, value in redact.values_of(OmegaConf.to_container(cfg)) if isinstance(value, str))
    return {name for text in texts for name in _OF_ENV_SET.findall(text) if redact.named_secret(name)}


def _literal(value: object) -> str:
    quoted = str(value).replace("'", r"\'")
    return f"${{oc.select:hydra,'{quoted}'}}"


def _of_hydra(raw: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys, from the top down, of each text that has an interpolation with Hydra's resolver."""
    if isinstance(raw, dict | list):
        for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw):
            yield from _of_hydra(value, (*path, key))
    elif isinstance(raw, str) and _OF_HYDRA.search(raw):
        yield path


def _node(config: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda node, key: node[key], path, config)


def read_by(is_reader: Callable[[str], bool], content: Mapping[str, Any]) -> set[str]:
    """Return the keys that the values of some keys refer to, also by way of values of other keys.

    Args:
        content: of a config, with its interpolations.
    """
    values = dict(with_full_names(content, (Mapping, list)))
    found, readers = set[str](), {key for key in values if is_reader(key)}
    while readers:
        words = {word for key in readers for word in _words_inside(values.pop(key))}
        found |= words
        readers = {key for key in values if any(meet(key, word) for word in words)}
    return found


def _words_inside(value: Any) -> Iterator[str]:
    while isinstance(value, str) and (found := _INTERPOLATION.search(value)):  # the inner ones first
        yield from _words(found[0])
        value = value.replace(found[0], " ")  # no text that makes an interpolation of what comes after it


def _words(text: str) -> Iterator[str]:
    for word in re.findall(r"[\w.\[\]-]+", text):
        yield word.replace("[", ".").replace("]", "").rstrip(".")  # it may go on with another value


def meet(key: str, other: str) -> bool:
    """Return whether two keys are the same, or one is a part of the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def is_read(key: str, config: Any) -> bool:
    """Return whether interpolations read a key: by itself, with a node around it, or in part."""
    values = (value for _, value in with_full_names(config, (Mapping, list)))
    texts = (value for value in values if isinstance(value, str) and "${" in value)
    return any(meet(key, word) for text in texts for word in _words(text))


def with_full_names(config: Any, inside: tuple[type, ...] = (Mapping,)) -> Iterator[tuple[str, Any]]:
    """Yield the values of a config, each by its key, as `redact.leaves` does, with full names in interpolations."""
    known = _keys(config)

    def named(value: Any, path: list[str]) -> Any:
        if isinstance(value, list):
            return [named(item, [*path, str(number)]) for number, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        around = path[:-1]

        def full(found: re.Match[str]) -> str:
            name, dots = found.groups()
            if dots:
                return "".join(f"{part}." for part in around[: max(0, len(around) + 1 - len(dots))])
            return _found(name, around, known)

        return _INTERPOLATION.sub(lambda found: _RELATIVE.sub(full, found[0]), value)

    for key, value in redact.leaves(config, inside=inside):
        yield key, named(value, key.split("."))
