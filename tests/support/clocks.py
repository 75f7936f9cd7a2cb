"""Sets the time that one module sees."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def set_time(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., Any]) -> None:
    """Replace functions of `time` for a module alone: clusters that other tests share have threads in this process."""
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(module.time), **functions}))
