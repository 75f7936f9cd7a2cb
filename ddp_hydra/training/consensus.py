"""Lets all ranks decide alike whether a step counts and whether to stop after it, and compute equally many batches."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddp_hydra import heartbeat
from ddp_hydra.rank.world import ALONE, World


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of a vote, the same on all ranks.

    Args:
        stop: the reason to stop after this step, a number of `heartbeat.REASONS`; 0 to continue.
        bad_rank: the first rank whose step may not count; None if all may.
        log: by the clock of some rank, it is time to log.
        changed: some rank has changed buffers in its forward pass.
        n: what the step's loss is a mean over, of each rank.
    """

    stop: int = 0
    bad_rank: int | None = None
    log: bool = False
    changed: bool = False
    n: tuple[float, ...] = field(default=(), compare=False)


LEAVE = heartbeat.REASONS.index("leave")
FIELDS = 6
"""Numbers of a vote before the numbers of the ranks."""


class StepConsensus:
    """Reduces votes over all ranks: a few numbers that travel together with the gradients, so they cost no time.

    They travel over the CPU, so the values voted on have to be there.

    Args:
        counts: returns two counts of this rank that travel with each vote.
        take: called with the minimum of each count over all ranks when a decision is known.
    """

    def __init__(
        self,
        world: World = ALONE,
        counts: Callable[[], list[int]] = lambda: [0, 0],
        take: Callable[[list[int]], None] = lambda counts: None,
    ) -> None:
        self.world, self.counts, self.take = world, counts, take

    def vote(
        self,
        good: bool | Callable[[], bool] = True,
        stop: int = 0,
        log: bool = False,
        send_along: Callable[[torch.Tensor], Callable[[], Any]] | None = None,
        n: float | Callable[[], float] = 0.0,
        changed: bool = False,
    ) -> Callable[[], Decision]:
        # A collective.
        if callable(good) or callable(n):
            return functools.cache(
                lambda: self.vote(
                    good() if callable(good) else good, stop, log, n=n() if callable(n) else n, changed=changed
                )()
            )
        counts = (-count for count in self.counts())
        rank, size = self.world.rank, self.world.size
        of_ranks = [0.0] * size
        of_ranks[rank] = n if n >= 0 else math.inf  # which is refused where it is used
        # All are reduced to their maximum over the ranks.
        numbers = [stop, 0 if good else size - rank, log, changed, *counts, *of_ranks]
        votes = torch.tensor(numbers, dtype=torch.float64)
        wait: Callable[[], Any] = lambda: None  # noqa: E731
        if send_along is not None and size > 1:
            wait = send_along(votes)
        elif size > 1:
            wait = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.world.cpu_group, async_op=True).wait

        def decision() -> Decision:
            wait()
            numbers = votes.tolist()
            stop, bad, log, changed, *counts = map(int, numbers[:FIELDS])
            self.take([-count for count in counts])
            return Decision(stop, size - bad if bad else None, bool(log), bool(changed), tuple(numbers[FIELDS:]))

        return decision

    def decide(self, good: bool = True, stop: int = 0) -> Decision:
        # A collective.
        return self.vote(good, stop)()


def things(votes: torch.Tensor) -> list[float]:
    found: list[float] = torch.amax(votes[:, FIELDS:], 0).tolist()
    return found


class Rounds:
    """Gives each rank as many batches as the rank with the most has, and ends all ranks after the same one.

    A forward pass may contain a collective, so all ranks have to make equally many. A rank whose batches have ended
    gets its last one again, marked as none of its own.

    Args:
        stop: returns the reason to stop after this round, a number of `heartbeat.REASONS`; 0 to continue.
        spare: makes a batch for a rank that has none; None if that can't be.

    Attributes:
        stopped: the reason for which all ranks have stopped; 0 if they have computed everything.
    """

    def __init__(self, world: World, stop: Callable[[], Any], spare: Callable[[], Any]) -> None:
        self.consensus, self.stop, self.spare = StepConsensus(world), stop, spare
        self.stopped = 0

    def of(self, batches: Iterable[tuple[Any, list[int]]]) -> Iterator[tuple[Any, list[int], bool]]:
        # A collective. The vote on a round travels while the round before is computed. In these votes, `changed` says
        # that a rank has more batches.
        own = iter(batches)
        coming = next(own, None)
        goes_on = self.consensus.vote(changed=coming is not None)().changed
        batch, indices = coming or (self.spare() if goes_on else None, [])
        while goes_on:
            is_own = coming is not None
            batch, indices = coming or (batch, indices)
            coming = next(own, None) if is_own else None
            decide = self.consensus.vote(stop=int(self.stop()), changed=coming is not None)
            if batch is not None:
                yield batch, indices, is_own
            decision = decide()
            self.stopped = decision.stop
            goes_on = decision.changed and not self.stopped


class StopSignal:
    """Tells whether this rank should stop at its next step: it was asked to, or its time is up.

    Args:
        time_limit_s: seconds from now; None for no limit.

    Attributes:
        asked: the reason why a callback asks to stop, a number of `heartbeat.REASONS`; 0 for none.
        asked_after: the step after which it has asked.
        why: the callback's reason in words.
    """

    def __init__(self, time_limit_s: float | None = None) -> None:
        self.deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self.asked, self.asked_after, self.why = 0, 0, ""

    def reason(self) -> int:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return heartbeat.REASONS.index("time_limit")
        here = heartbeat.here()
        return here.finish or self.asked or (LEAVE if here.leave else 0)

    def interrupted(self) -> int:
        reason = self.reason()
        return 0 if heartbeat.REASONS[reason] in ("done", "leave") else reason
