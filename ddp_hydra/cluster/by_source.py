"""Functions for machines that may lack ddp_hydra: they travel as the text of their module.

Pickled by name, they would need ddp_hydra where they arrive; pickled as code, the very same Python version.
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
"""An expression that is the function; its module is made where it is not known yet."""


class Shipped:
    """Pickles so that the function itself comes out, anywhere.

    Args:
        function: of a module that imports the standard library and Dask only.
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
