"""Define the base class of callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_hydra.training.callbacks.view import View


class Callback:
    """Code that is called at certain moments, on all ranks alike. A subclass defines the methods that it needs.

    A callback looks, logs, and may ask to stop. It does not change weights, learning rates or what is frozen: a run
    that is resumed would not repeat that. `View.unfreeze` is the exception, because checkpoints remember it. If a
    callback has to change more, it sets `changes_training`, and keeps what a resume needs in its own state.
    """

    changes_training = False

    def on_start(self, run: View) -> None:
        """Act before the first step, also of a resumed run."""

    def on_step(self, run: View) -> None:
        """Act after each step."""

    def on_validation(self, run: View) -> None:
        """Act after each validation, whose metrics `run.metrics` has; after each epoch without a validation set."""

    def on_checkpoint(self, run: View) -> None:
        """Act before each checkpoint is written."""

    def on_end(self, run: View) -> None:
        """Act after the last step, also of a run that was asked to stop."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: tensors and plain values; by default, nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
