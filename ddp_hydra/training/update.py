"""One update of a step: a part of the model with its optimizer. Most tasks have one, of the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ddp_hydra.training.optimizer_step import OptimizerStep
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.step_check import StepCheck


@dataclass
class Update:
    """An update of a part of the model.

    Args:
        name: of the part; "" for the whole model.
        parallel: the training step among its ranks.
        optimizer_step: applies gradients.
        check: decides with all ranks whether the step is finite.
        others: parameters that other updates train, and this one does not.
    """

    name: str
    parallel: Parallel
    optimizer_step: OptimizerStep
    check: StepCheck
    others: list[nn.Parameter]

    def begin(self) -> None:
        """Clear the last gradients, and let the backward pass stop at the parts of other updates."""
        for parameter in self.others:
            parameter.requires_grad_(False)
        if self.others:
            for _, parameter in self.optimizer_step.trained:
                parameter.requires_grad_()
        self.optimizer_step.begin()
