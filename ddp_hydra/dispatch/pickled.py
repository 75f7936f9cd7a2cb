"""Pickles a user's function and its arguments for the ranks."""

from __future__ import annotations

import importlib
import io
import sys
from types import ModuleType
from typing import Any

import cloudpickle


def dumps(value: Any) -> bytes:
    """Pickle a value, with functions of scripts and notebooks by their content."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Pickles modules of any class by their name.

    cloudpickle looks for submodules by the names in a function, and finds `torch.classes` in one that only says
    `torch.nn` and `dataset.classes`. That is an object of a class of its own, which it cannot pickle.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)
