"""Holds the optimizers, schedules and scalers of a task with several updates by their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ByName(dict[str, Any]):
    """The optimizers or schedules of several updates, which are saved together."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each by its name."""
        return {name: part.state_dict() for name, part in self.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of each.

        Raises:
            KeyError: there is none for one of them.
        """
        for name, part in self.items():
            part.load_state_dict(state[name])


def together(parts: dict[str, Any]) -> Any:
    """Return the only part itself, or several by name."""
    return parts[""] if list(parts) == [""] else ByName(parts)


def each(part: Any) -> Iterable[tuple[str, Any]]:
    """Yield the name and the object of each part that `together` has put together."""
    return part.items() if isinstance(part, ByName) else [("", part)]
