"""Calls the callbacks of a run, and sees that they change nothing that a resume would not repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ddp_hydra.errors import ConfigError
from ddp_hydra.training.callbacks.base import Callback, View
from ddp_hydra.training.state import State, each


class Callbacks:
    """The callbacks of a run, by their names in the config.

    Args:
        callbacks: in the order of the config.
        state: of the run.
    """

    def __init__(self, callbacks: Mapping[str, Callback], state: State) -> None:
        self.callbacks, self.state = dict(callbacks), state
        self.view: View | None = None

    def call(self, event: str) -> None:
        """Call the method of all callbacks for an event: start, step, validation, checkpoint or end.

        Raises:
            ConfigError: a callback has changed the training without `changes_training`.
        """
        for name, callback in self.callbacks.items():
            with self._unchanged(name, callback):
                getattr(callback, f"on_{event}")(self.view)

    @contextmanager
    def _unchanged(self, name: str, callback: Callback) -> Iterator[None]:
        modes = [(module, module.training) for module in self.state.model.modules()]
        before = self._fingerprint()
        yield
        for module, mode in modes:
            module.training = mode
        unfroze = self.state.unfrozen != before["unfrozen"]
        if callback.changes_training or unfroze:
            return
        after = self._fingerprint()
        if changed := [what for what, value in before.items() if value != after[what]]:
            raise ConfigError(
                f"callbacks.{name} ({type(callback).__name__}) has changed {' and '.join(changed)}, which a resumed "
                "run would not repeat: use run.unfreeze(...) to train frozen parameters, or set changes_training=True "
                "in its class, and keep in its state_dict() what a resume needs"
            )

    def _fingerprint(self) -> dict[str, Any]:
        """Return numbers that change when the training is changed."""
        model = self.state.model
        groups = [group for _, optimizer in each(self.state.optimizer) for group in optimizer.param_groups]
        return {
            "weights": sum(tensor._version for tensor in (*model.parameters(), *model.buffers())),
            "what is frozen": [parameter.requires_grad for parameter in model.parameters()],
            "the optimizer's settings": [[v for k, v in group.items() if k != "params"] for group in groups],
            "unfrozen": list(self.state.unfrozen),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback that has one."""
        states = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the state of the callbacks that the checkpoint knows."""
        for name, callback in self.callbacks.items():
            if name in states:
                callback.load_state_dict(states[name])
