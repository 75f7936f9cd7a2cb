"""List the options of config groups without a copy of all configs for each group, as Hydra makes it.

`--help` then takes a second less, and the tab key answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.object_type import ObjectType


@contextmanager
def listed_without_copies() -> Iterator[None]:
    """Let Hydra ask its repository of configs directly inside the block, where no override can change the answer."""
    original: Any = ConfigLoaderImpl.get_group_options

    def get_group_options(
        self: Any,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        if config_name is None and not overrides:
            return list(self.repository.get_group_options(group_name, results_filter))
        return list(original(self, group_name, results_filter, config_name, overrides))

    ConfigLoaderImpl.get_group_options = get_group_options  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.get_group_options = original  # type: ignore[method-assign]
