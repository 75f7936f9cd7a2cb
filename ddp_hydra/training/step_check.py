"""Decides with all ranks whether a step may count: its loss and its gradients have to be finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ddp_hydra.training.consensus import Decision, StepConsensus
from ddp_hydra.training.finite import GradientNorms, are_finite
from ddp_hydra.training.nonfinite import NonFiniteStep
from ddp_hydra.training.optimizer_step import OptimizerStep


class StepCheck:
    """Checks losses before the gradients are averaged, and gradients after it, when all ranks have the same.

    Args:
        optimizer_step: measures the gradients.
        consensus: votes of the ranks.
        late: check the gradients of a step together with the next step's loss. Then the loop need not wait for the
            backward pass of a GPU, but the weights have taken up the gradients by then.
    """

    def __init__(self, optimizer_step: OptimizerStep, consensus: StepConsensus, late: bool = False) -> None:
        self.optimizer_step, self.consensus, self.late = optimizer_step, consensus, late
        self.unchecked: GradientNorms | None = None

    def vote(self, losses: Sequence[Tensor], stop: int, log: bool = False) -> Callable[[], Decision]:
        """Send the other ranks a vote on this step; return a function that waits for theirs. A collective.

        Args:
            losses: of the step's micro-batches, on this rank.
            stop: why this rank is asked to stop, a number of `heartbeat.REASONS`; 0 if it is not.
            log: by this rank's clock, it is time to log.
        """
        good = are_finite(losses, self.unchecked)
        return self.consensus.vote(good, stop, log, self.optimizer_step.parallel.send_along)

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
        if not self.optimizer_step.parallel.same_gradients:
            bad_rank = self.consensus.decide(good=not names).bad_rank
        return None if bad_rank is None else NonFiniteStep(bad_rank, gradients.loss, names)
