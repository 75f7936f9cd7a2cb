"""Lets all ranks decide alike whether a step counts and whether to stop after it, and share their numbers."""

from __future__ import annotations

import functools
import math
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddp_hydra import heartbeat


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of a vote, the same on all ranks.

    Args:
        stop: the reason to stop after this step, a number of `heartbeat.REASONS`; 0 to continue.
        bad_rank: the first rank whose step may not count; None if all may.
        log: by the clock, it is time to log.
        n: what the step's loss is a mean over, of each rank.
    """

    stop: int = 0
    bad_rank: int | None = None
    log: bool = False
    n: tuple[float, ...] = field(default=(), compare=False)


FIELDS = 5
"""Numbers of a vote before the numbers of the ranks."""
SMALL = 4096
"""Bytes of a value that takes one exchange."""


class StepConsensus:
    """Reduces votes over all ranks: a few numbers that travel together with the gradients, so they cost no time.

    They travel over the CPU, so the values voted on have to be there.

    Args:
        counts: returns two counts of this rank that travel with each vote.
        take: called with the minimum of each count over all ranks when a decision is known.
    """

    def __init__(
        self,
        counts: Callable[[], list[int]] = lambda: [0, 0],
        take: Callable[[list[int]], None] = lambda counts: None,
    ) -> None:
        self.world_size = world_size()
        self.alone = self.world_size == 1
        self.rank = 0 if self.alone else dist.get_rank()
        self.counts, self.take = counts, take
        self.group: Any = None if self.alone or has_gloo() else dist.new_group(backend="gloo")

    def vote(
        self,
        good: bool | Callable[[], bool] = True,
        stop: int = 0,
        log: bool = False,
        send_along: Callable[[torch.Tensor], Callable[[], Any]] | None = None,
        n: float | Callable[[], float] = 0.0,
    ) -> Callable[[], Decision]:
        # A collective.
        if callable(good) or callable(n):
            return functools.cache(
                lambda: self.vote(good() if callable(good) else good, stop, log, n=n() if callable(n) else n)()
            )
        counts = (-count for count in self.counts())
        of_ranks = [0.0] * self.world_size
        of_ranks[self.rank] = n if n >= 0 else math.inf  # which is refused where it is used
        # All are reduced to their maximum over the ranks.
        numbers = [stop, 0 if good else self.world_size - self.rank, log, *counts, *of_ranks]
        votes = torch.tensor(numbers, dtype=torch.float64)
        wait: Callable[[], Any] = lambda: None  # noqa: E731
        if send_along is not None and not self.alone:
            wait = send_along(votes)
        elif not self.alone:
            wait = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group, async_op=True).wait

        def decision() -> Decision:
            wait()
            numbers = votes.tolist()
            stop, bad, log, *counts = map(int, numbers[:FIELDS])
            self.take([-count for count in counts])
            return Decision(stop, self.world_size - bad if bad else None, bool(log), tuple(numbers[FIELDS:]))

        return decision

    def decide(self, good: bool = True, stop: int = 0) -> Decision:
        # A collective.
        return self.vote(good, stop)()

    def gather_objects(self, value: Any) -> list[Any]:
        # A collective. Small values take one exchange, where torch's own function makes two.
        if self.alone:
            return [value]
        content = pickle.dumps(value)
        content = content if len(content) <= SMALL else pickle.dumps(...)
        row = torch.zeros(SMALL, dtype=torch.uint8)
        row[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row, group=self.group)
        found = [pickle.loads(bytes(one.numpy())) for one in rows]  # noqa: S301
        return gather_objects(value, self.group) if any(one is ... for one in found) else found


def things(votes: torch.Tensor) -> list[float]:
    found: list[float] = torch.amax(votes[:, FIELDS:], 0).tolist()
    return found


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    # A collective.
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def from_rank_0(make: Callable[[], Any]) -> Any:
    # A collective.
    if world_size() == 1:
        return make()
    box = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def has_gloo() -> bool:
    try:
        return "gloo" in str(dist.get_backend_config())
    except (AttributeError, RuntimeError, ValueError):
        return str(dist.get_backend()) == "gloo"


class StopSignal:
    """Tells whether this rank should stop at its next step: it was asked to, or its time is up.

    Args:
        time_limit_s: seconds from now; None for no limit.

    Attributes:
        asked: the reason why a callback asks to stop, a number of `heartbeat.REASONS`; 0 for none.
        why: the callback's reason in words.
    """

    def __init__(self, time_limit_s: float | None = None) -> None:
        self.deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self.asked, self.why = 0, ""

    def reason(self) -> int:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return heartbeat.REASONS.index("time_limit")
        return heartbeat.here().finish or self.asked

    def interrupted(self) -> int:
        reason = self.reason()
        return 0 if heartbeat.REASONS[reason] == "done" else reason
