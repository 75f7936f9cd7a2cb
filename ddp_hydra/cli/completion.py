"""Tab completion of values: Hydra offers what a key is now, this also what it may be."""

from __future__ import annotations

import sys
from typing import Any

from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import BooleanNode, EnumNode, OmegaConf


def offer_choices() -> None:
    """Have Hydra's completion offer all values of an enum or a boolean, where it is asked for by the shell."""
    if {"-sc", "--shell-completion"} & set(sys.argv):
        hydras = CompletionPlugin._get_matches
        CompletionPlugin._get_matches = staticmethod(  # type: ignore[method-assign]
            lambda config, word: choices(config, word) or hydras(config, word)
        )


def choices(config: Any, word: str) -> list[str]:
    """Return the words that a "key=" or "key=beginning" can become; none where the key takes anything.

    Args:
        config: as composed so far.
        word: that is to be completed.
    """
    key, given, begun = word.partition("=")
    parent, _, name = key.rpartition(".")
    holder = OmegaConf.select(config, parent) if parent else config
    if not given or not OmegaConf.is_dict(holder) or name not in holder:
        return []
    node = holder._get_node(name)
    if isinstance(node, EnumNode):
        values = [one.name for one in node.enum_type]
    elif isinstance(node, BooleanNode):
        values = ["false", "true"]
    else:
        return []
    values += ["null"] if node._is_optional() else []
    return [f"{key}={value}" for value in values if value.startswith(begun)]
