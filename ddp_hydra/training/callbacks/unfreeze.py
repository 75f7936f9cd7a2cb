"""Trains frozen parameters from some epoch on."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hydra.training.callbacks.base import Callback, View


class Unfreeze(Callback):
    """Trains parameters that `trainer.freeze` has frozen, once some epochs are done.

    Args:
        after_epochs: epochs in which they stay frozen.
        parameters: patterns of their names.
        lr: the optimizer's own rate for them; None: that of the others.
    """

    def __init__(self, after_epochs: int, parameters: Sequence[str] = ("*",), lr: float | None = None) -> None:
        self.after_epochs, self.parameters, self.lr = after_epochs, list(parameters), lr
        self.done = False

    def on_validation(self, run: View) -> None:
        """Unfreeze them after the epoch."""
        if not self.done and run.epoch >= self.after_epochs and run.step < run.total_steps:
            self.done = True
            run.unfreeze(self.parameters, self.lr)

    def state_dict(self) -> dict[str, bool]:
        """Return whether it is done."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """Restore whether it is done."""
        self.done = state["done"]
