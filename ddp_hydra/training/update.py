"""One update of a step: a part of the model with its optimizer. Most tasks have one, of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ddp_hydra.training.consensus import Decision, StepConsensus
from ddp_hydra.training.finite import GradientNorms, are_finite
from ddp_hydra.training.nonfinite import NonFiniteStep
from ddp_hydra.training.optimizer_step import OptimizerStep


class Update:
    """An update of a part of the model. It counts only if its loss and its gradients are finite on all ranks.

    Losses are checked before the gradients are averaged, and gradients after it, when all ranks have the same.

    Args:
        name: of the part; "" for the whole model.
        optimizer_step: applies gradients.
        scheduler: of the learning rate.
        consensus: votes of the ranks.

    Attributes:
        parallel: the training step among its ranks.
        others: parameters that other updates train, and this one does not.
        late: check the gradients of a step together with the next step's loss. Then the loop need not wait for the
            backward pass of a GPU, but the weights have taken up the gradients by then.
    """

    def __init__(self, name: str, optimizer_step: OptimizerStep, scheduler: Any, consensus: StepConsensus) -> None:
        self.name, self.optimizer_step, self.scheduler, self.consensus = name, optimizer_step, scheduler, consensus
        self.parallel = optimizer_step.parallel
        self.others: list[nn.Parameter] = []
        self.late = False
        self.unchecked: GradientNorms | None = None

    def begin(self) -> None:
        """Clear the last gradients, and let the backward pass stop at the parts of other updates."""
        for parameter in self.others:
            parameter.requires_grad_(False)
        if self.others:
            for _, parameter in self.optimizer_step.trained:
                parameter.requires_grad_()
        self.optimizer_step.begin()

    def vote(self, losses: Sequence[Tensor], stop: int, log: bool = False) -> Callable[[], Decision]:
        """Send the other ranks a vote on this step; return a function that waits for theirs. A collective.

        Args:
            losses: of the step's micro-batches, on this rank.
            stop: why this rank is asked to stop, a number of `heartbeat.REASONS`; 0 if it is not.
            log: by this rank's clock, it is time to log.
        """
        good = are_finite(losses, self.unchecked)
        return self.consensus.vote(good, stop, log, self.parallel.send_along)

    def find_nonfinite(
        self, decision: Decision, losses: Sequence[Tensor], at_once: bool = False
    ) -> NonFiniteStep | None:
        """Return the step that is not finite: the one under way or, if checked late, the one before; else None.

        Called after the backward pass. It is a collective where the ranks' gradients differ.

        Args:
            decision: on the losses.
            losses: of the step's micro-batches, on this rank.
            at_once: check this step's gradients now: what follows it can't be taken back.
        """
        before, self.unchecked = self.unchecked, None
        if before is not None and (names := before.nonfinite_names()):
            return NonFiniteStep(0, before.loss, names, steps_ago=1)
        if decision.bad_rank is not None:
            return NonFiniteStep(decision.bad_rank, float(sum(losses)))
        gradients = self.optimizer_step.measure(losses)
        if gradients is None:
            return None
        if self.late and not at_once:
            self.unchecked = gradients
            return None
        names = gradients.nonfinite_names()
        bad_rank = 0 if names else None
        if not self.parallel.same_gradients:
            bad_rank = self.consensus.decide(good=not names).bad_rank
        return None if bad_rank is None else NonFiniteStep(bad_rank, gradients.loss, names)
