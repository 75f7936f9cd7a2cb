"""Decides for all ranks alike whether a step may count: its loss and its gradient have to be finite."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_hydra.training.consensus import Decision, DeferredVote, StepConsensus, Vote
from ddp_hydra.training.finite import Gradients, are_finite
from ddp_hydra.training.nonfinite import Trouble
from ddp_hydra.training.optimizer_step import OptimizerStep


class Inspection:
    """Looks at losses before, and at gradients after they are averaged: all ranks see the same then.

    Args:
        update: takes the lengths of the gradients.
        consensus: of the ranks.
        late: look at the gradients of a step when the next one's loss is looked at. So nobody waits for the backward
            pass of a GPU; but the weights have taken them up then.
    """

    def __init__(self, update: OptimizerStep, consensus: StepConsensus, late: bool = False) -> None:
        self.update, self.consensus, self.late = update, consensus, late
        self.unseen: Gradients | None = None

    def vote(self, losses: Sequence[Tensor], stop: int) -> Vote | DeferredVote:
        """Tell the other ranks of the losses of a step's parts, and whether to stop. A collective."""
        return self.consensus.vote(good=are_finite(losses, self.unseen), stop=stop)

    def judge(self, decision: Decision, losses: Sequence[Tensor], now: bool = False) -> Trouble | None:
        """Look at the gradients of a step, after its backward pass.

        Args:
            decision: on the losses.
            losses: of the step's parts, on this rank.
            now: not later: the step is the last before something that can't be taken back.
        """
        before, self.unseen = self.unseen, None
        if before is not None and (names := before.bad()):
            return Trouble(0, before.loss, names, ago=1)
        if decision.bad_rank is not None:
            return Trouble(decision.bad_rank, float(sum(losses)))
        gradients = self.update.measure(losses)
        if gradients is None:
            return None
        if self.late and not now:
            self.unseen = gradients
            return None
        names = gradients.bad()
        bad_rank = 0 if names else None
        if not self.update.model.alike:
            bad_rank = self.consensus.vote(good=not names).result().bad_rank
        return None if bad_rank is None else Trouble(bad_rank, gradients.loss, names)
