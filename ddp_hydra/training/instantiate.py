"""Instantiates what the config names by `_target_`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object
from omegaconf import DictConfig, open_dict

from ddp_hydra.config import targets
from ddp_hydra.config.hydra_compat import instantiate
from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError, DdpHydraError


def make(node: DictConfig, *args: Any, **kwargs: Any) -> Any:
    # If the class refuses an argument, raise its message as a ConfigError.
    try:
        # Arguments go past Hydra, which would copy each into a config.
        return prepared(node)(*args, **kwargs)
    except DdpHydraError:
        raise
    except InstantiationException as error:
        if error.__cause__ is None or isinstance(error.__cause__, (ImportError, AttributeError)):
            raise ConfigError(f"{node.get('_target_')}: {targets.explain(str(node.get('_target_')), error)}") from error
        raise
    except (OSError, ValueError, TypeError, LookupError, ImportError, AttributeError) as error:
        raise ConfigError(f"{node.get('_target_')}: {reason_of(error, node)}") from error


def reason_of(error: Exception, node: DictConfig) -> str:
    told = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
    said = text.raised_at(error) or not_taken(node) or not_given(node, error) or told or type(error).__name__
    first, newline, rest = said.partition("\n")
    advice = ": for a tensor, give {_target_: torch.tensor, data: [...]}" if "ListConfig" in first else ""
    return f"{first}{advice}{newline}{rest}"


def prepared(node: DictConfig) -> Callable[..., Any]:
    # Hydra copies a node several times before it calls the target, which takes milliseconds. Of a node with plain
    # values only, nothing is left to do but to find the target.
    with contextlib.suppress(Exception):  # Hydra says what is wrong with it
        values = {str(key): value for key, value in node.items()}
        target = values.pop("_target_")
        is_plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in values.values())
        if isinstance(target, str) and is_plain and not any(key.startswith("_") for key in values):
            return functools.partial(get_object(target), **values)
    return instantiate(node, _partial_=True)


def without(node: DictConfig, keys: Iterable[str]) -> DictConfig:
    # `OmegaConf.masked_copy` has no place: interpolations of other parts find nothing, and messages name half a key.
    copied = copy.copy(node)
    with open_dict(copied):
        for key in keys:
            del copied[key]
    return copied


def not_taken(node: DictConfig) -> str:
    taken = parameters(str(node.get("_target_")))
    if not taken or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return ""
    refused = [str(key) for key in node if key not in taken and not str(key).startswith("_")]
    if not refused:
        return ""
    names = [name for name in taken if name not in ("self", "params")]
    hints = "".join(text.meant(key, names) for key in refused)
    leave_out = " ".join(f"'~{node._get_full_key(key)}'" for key in refused)
    there = text.after(hints, f"it takes {', '.join(names)}")
    return f"it takes no {', '.join(refused)}{there}. To leave the others out, type {leave_out}"


def not_given(node: DictConfig, error: Exception) -> str:
    if not re.search(r"missing \d+ required", str(error)):
        return ""
    target, key = str(node.get("_target_")), node._get_full_key(None)
    words = [f"+{key}.{name}=<value>" for name in re.findall(r"'(\w+)'", str(error))]
    if key == "loss" and inspect.isfunction(get_object(target)):  # meant as the loss itself, as cross_entropy is
        words = ["loss._target_=hydra.utils.get_method", f"+loss.path={target}"]
        words += [f"'~loss.{name}'" for name in map(str, node) if name != "_target_"]
    return f"{error}: give {' '.join(words)}"


def parameters(target: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(get_object(target)).parameters
    except (ValueError, ImportError, TypeError, InstantiationException):
        return {}


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    return [
        name
        for name, one in inspect.signature(function).parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]


def init_parameters(target: str) -> set[str]:
    taken: set[str] = set()
    for base in getattr(get_object(target), "__mro__", ()):
        if "__init__" in vars(base):
            own = inspect.signature(base.__init__).parameters
            taken |= own.keys()
            if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in own.values()):
                break
    return taken
