"""Sends functions as the source text of their module, to machines that may lack ddp_hydra.

A function that is pickled by name needs ddp_hydra where it arrives. One that is pickled as code needs the very same
Python version.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

_LOAD = """
(lambda sys, types, name, text: getattr(
    sys.modules.get(name) or (lambda module:
        exec(compile(text, name, 'exec'), vars(module)) or sys.modules.setdefault(name, module)
    )(types.ModuleType(name)),
    {function!r},
))(__import__('sys'), __import__('types'), {name!r}, {text!r})
""".strip()
"""An expression whose value is the function. It makes the module where that does not exist yet."""


class BySource:
    """Pickles a function by its module's source, so that it can be unpickled anywhere.

    Args:
        function: of a module that imports only the standard library and Dask.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (_expression(self.function.__module__, self.function.__name__),)


@functools.cache
def _expression(module: str, function: str) -> str:
    text = inspect.getsource(sys.modules[module])
    name = f"_{module.replace('.', '_')}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return _LOAD.format(function=function, name=name, text=text)
