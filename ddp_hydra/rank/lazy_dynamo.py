"""Puts torch's compiler off until a rank compiles: a third of what a rank imports, and each optimizer asks for it."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
UTILS = f"{NAME}.utils"
TRACE_RULES = f"{NAME}.trace_rules"
MARK = "__dynamo_disable"
"""Attribute of a function that torch has marked: how to call it."""


def put_off() -> None:
    """Let stand-ins answer, unless torch._dynamo has been imported."""
    if NAME not in sys.modules:
        LazyDynamo()


def import_if_wanted() -> bool:
    """Import torch._dynamo if a fork of this process had to, so that the next ones have it; return whether it did."""
    module = sys.modules.get(NAME)
    if isinstance(module, StandIn) and module._owner.is_wanted[0]:
        with contextlib.suppress(Exception):  # a fork that needs it reports the error
            module._owner.give_way()
            return True
    return False


class LazyDynamo:
    """Puts stand-ins in the place of torch._dynamo's modules, and imports these when anything else is asked of them."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.lock = threading.Lock()  # not held during an import, which has locks of its own
        self.marked: list[Any] = []
        self.is_wanted = mmap.mmap(-1, 1)  # a byte that all forks share: one of them had to import it
        self.modules = {
            UTILS: StandIn(
                UTILS,
                self,
                get_optimize_ddp_mode=lambda: "ddp_optimizer",
                is_compile_supported=self.is_compile_supported,
            ),
            TRACE_RULES: StandIn(TRACE_RULES, self, clear_lru_cache=lambda: None),
        }
        self.modules[NAME] = StandIn(
            NAME,
            self,
            __file__=str(Path(torch.__file__).parent / "_dynamo" / "__init__.py"),
            utils=self.modules[UTILS],
            trace_rules=self.modules[TRACE_RULES],
            graph_break=lambda msg="": None,
            disable=self.disable,
        )
        sys.meta_path.insert(0, Finder())
        self.put()

    def put(self) -> None:
        sys.modules.update(self.modules)
        self.torch._dynamo = self.modules[NAME]

    def give_way(self) -> None:
        """Import torch._dynamo, unless it has been, or wait until another thread has."""
        with self.lock:
            is_first = sys.modules.get(NAME) is self.modules[NAME]
            if is_first:
                self.is_wanted[0] = 1
                del self.torch._dynamo
                for name in self.modules:
                    del sys.modules[name]
        try:
            importlib.import_module(NAME)
        except BaseException:
            if is_first:
                self.put()
            raise
        if is_first:
            for function in self.marked:  # torch marks it at its next call
                function.__dict__.pop(MARK, None)

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "torch._compile":
            self.marked.append(fn)
            return fn
        self.give_way()
        return self.torch._dynamo.disable(fn, recursive, **options)

    def is_compile_supported(self, device_type: Any) -> Any:
        """Ask the real one, only when torchvision needs to know: it imports this function in any case."""
        self.give_way()
        return sys.modules[UTILS].is_compile_supported(device_type)


class StandIn(ModuleType):
    """Answers a few calls instead of a module, with `attributes`, and gives way for anything else."""

    def __init__(self, name: str, owner: LazyDynamo, **attributes: Any) -> None:
        super().__init__(name)
        self.__dict__.update(attributes, _owner=owner)

    def __getattr__(self, name: str) -> Any:
        is_search = name == "__path__" and self.__name__ == NAME  # for one of the package's modules
        if name.startswith("__") and not is_search:  # code that scans sys.modules must not trigger the import
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._owner.give_way()
        return getattr(sys.modules[self.__name__], name)


class Finder(MetaPathFinder, Loader):
    """Finds modules of torch._dynamo that have been imported already, so that Python does not import them again."""

    def __init__(self) -> None:
        self.specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(f"{NAME}.") and name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        found = sys.modules[spec.name]
        self.specs[spec.name] = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):  # torch's modules of settings let nobody change them
            module.__spec__ = self.specs[module.__name__]
