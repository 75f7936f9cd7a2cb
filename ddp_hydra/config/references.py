"""Tells which keys the interpolations of a config refer to; has the resolver `of_set` of our own options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationToMissingValueError, MissingMandatoryValue

from ddp_hydra.config import redact
from ddp_hydra.config.hydra_compat import IS_1_3

_INTERPOLATION = re.compile(r"\$\{[^{}]*\}")
_OF_SET = re.compile(r"\$\{of_set:\s*([\w-]+)\s*\}")
_RELATIVE = re.compile(r"\bof_set:\s*([\w-]+)|(?<![\w.\[\]-])(\.+)(?=[\w\[])")
"""Matches a key of the resolver, or the dots before a relative key."""


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


def interpolated(config: Any) -> Iterator[str]:
    """Yield the words inside all interpolations, with the full names of the keys that other values refer to."""
    for _, value in with_full_names(config, (Mapping, list)):
        for word in re.findall(r"[\w.\[\]-]+", value) if isinstance(value, str) and "${" in value else ():
            yield word.replace("[", ".").replace("]", "")


def meet(key: str, other: str) -> bool:
    """Return whether two keys are the same, or one is a part of the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def is_read(key: str, config: Any) -> bool:
    """Return whether interpolations read a key: by itself, with a node around it, or in part."""
    return any(meet(key, word.rstrip(".")) for word in interpolated(config))  # a word goes on with another value


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
