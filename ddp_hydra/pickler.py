"""A pickler for values of the user, with functions and classes of scripts and notebooks by their content."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

import cloudpickle


class Pickler(cloudpickle.Pickler):
    """Refuses open text files, as pickle does: cloudpickle makes a text of them, whose `seek` counts no bytes."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is io.TextIOWrapper and obj not in (sys.stdout, sys.stderr):
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # raises TypeError
        return super().reducer_override(obj)
