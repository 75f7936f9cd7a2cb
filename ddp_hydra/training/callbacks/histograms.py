"""Logs how weights and gradients are distributed."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hydra.training.cadence import is_due
from ddp_hydra.training.callbacks.base import Callback, View
from ddp_hydra.training.parameter_groups import is_chosen


class Histograms(Callback):
    """Shows the distribution of parameters, and of their gradients, in TensorBoard.

    Args:
        parameters: patterns of parameter names, "layer1.*".
        every_steps: steps between two histograms; 0: none.
        gradients: whether to show those of the gradients, too.
    """

    def __init__(self, parameters: Sequence[str] = ("*",), every_steps: int = 100, gradients: bool = True) -> None:
        self.parameters, self.every_steps, self.gradients = list(parameters), every_steps, gradients

    def on_step(self, run: View) -> None:
        """Show them when it is time."""
        if run.rank or not is_due(run.step, self.every_steps):
            return
        for name, parameter in run.model.named_parameters():
            if is_chosen([name], self.parameters):
                run.histogram(f"weights/{name}", parameter)
                if self.gradients and parameter.grad is not None:
                    run.histogram(f"gradients/{name}", parameter.grad)
