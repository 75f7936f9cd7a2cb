"""Complete values with the tab key: Hydra offers only the present value of a key, this all possible ones."""

from __future__ import annotations

import sys
from typing import Any

from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import BooleanNode, EnumNode, OmegaConf


def offer_choices() -> None:
    """Let Hydra's completion offer all values of an enum or a boolean, if the shell has asked for completion."""
    if {"-sc", "--shell-completion"} & set(sys.argv):
        original = CompletionPlugin._get_matches
        CompletionPlugin._get_matches = staticmethod(  # type: ignore[method-assign]
            lambda config, word: choices(config, word) or original(config, word)
        )


def choices(config: Any, word: str) -> list[str]:
    """Return the completions of "key=" or "key=beginning"; none if the key is no enum or boolean.

    Args:
        config: as composed so far.
        word: the word to complete.
    """
    key, equals, beginning = word.partition("=")
    parent, _, name = key.rpartition(".")
    holder = OmegaConf.select(config, parent) if parent else config
    if not equals or not OmegaConf.is_dict(holder) or name not in holder:
        return []
    node = holder._get_node(name)
    if isinstance(node, EnumNode):
        values = [one.name for one in node.enum_type]
    elif isinstance(node, BooleanNode):
        values = ["false", "true"]
    else:
        return []
    values += ["null"] if node._is_optional() else []
    return [f"{key}={value}" for value in values if value.startswith(beginning)]
