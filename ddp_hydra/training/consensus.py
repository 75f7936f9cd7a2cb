"""What all ranks must decide alike: whether a step counts, and whether to stop after it; and what they must know."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_hydra import heartbeat


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks know after a vote.

    Args:
        stop: number of the reason to stop after this step (see `pulse.REASONS`), 0 to go on.
        bad_rank: the first rank whose step is no good; None where all are good.
    """

    stop: int = 0
    bad_rank: int | None = None


class Vote:
    """One vote on its way.

    Args:
        ballot: [stop, world_size - rank where bad], int64, being reduced to the maximum of all ranks.
        work: to wait for; None where there is one rank only.
        world_size: number of ranks.
    """

    def __init__(self, ballot: torch.Tensor, work: dist.Work | None, world_size: int) -> None:
        self.ballot, self.work, self.world_size = ballot, work, world_size

    def result(self) -> Decision:
        """Wait for the others."""
        if self.work is not None:
            self.work.wait()
        stop, bad = self.ballot.tolist()
        return Decision(stop, self.world_size - bad if bad else None)


class DeferredVote:
    """One vote that is cast when its result is asked for.

    Args:
        cast: begins it.
    """

    def __init__(self, cast: Callable[[], Vote]) -> None:
        self.cast = functools.cache(cast)

    def result(self) -> Decision:
        """Cast it, and wait for the others. A collective."""
        return self.cast().result()


class StepConsensus:
    """Votes of a gang: 16 bytes that travel while the gradients do, so nobody waits for them.

    They go over the CPU: what is voted on has to be there.
    """

    def __init__(self) -> None:
        self.alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank, self.world_size = (0, 1) if self.alone else (dist.get_rank(), dist.get_world_size())
        self.group: Any = None if self.alone or has_gloo() else dist.new_group(backend="gloo")

    def vote(self, good: bool | Callable[[], bool] = True, stop: int = 0) -> Vote | DeferredVote:
        """Say what this rank thinks. A collective.

        Args:
            good: this rank's step may count. Where that has to be waited for, a function, called when the result is
                asked for: there is other work to do until then.
            stop: number of the reason to stop after it; 0 for none.
        """
        if callable(good):
            return DeferredVote(lambda: self._cast(good(), stop))
        return self._cast(good, stop)

    def _cast(self, good: bool, stop: int) -> Vote:
        ballot = torch.tensor([stop, 0 if good else self.world_size - self.rank])
        if self.alone:
            return Vote(ballot, None, 1)
        work = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        return Vote(ballot, work, self.world_size)

    def gather(self, *parts: list[float]) -> list[list[list[float]]]:
        """Tell each other numbers, all at once: what costs is not how many they are. A collective.

        Args:
            parts: lists of numbers, each as long on every rank.

        Returns:
            For each part, that of every rank.
        """
        mine = torch.tensor([number for part in parts for number in part], dtype=torch.float64)
        rows = [mine]
        if not self.alone:
            rows = [torch.empty_like(mine) for _ in range(self.world_size)]
            dist.all_gather(rows, mine, group=self.group)
        split = [torch.split(row, [len(part) for part in parts]) for row in rows]
        return [[part.tolist() for part in of_all] for of_all in zip(*split, strict=True)]


def has_gloo() -> bool:
    """Whether the gang's own process group takes tensors of the CPU."""
    try:
        return "gloo" in str(dist.get_backend_config())
    except (AttributeError, RuntimeError, ValueError):
        return str(dist.get_backend()) == "gloo"


class StopSignal:
    """Whether this rank should stop at its next step: because it was asked to, or by the clock.

    Args:
        time_limit_s: from now on; None for none.
    """

    def __init__(self, time_limit_s: float | None = None) -> None:
        self.deadline = None if time_limit_s is None else time.monotonic() + time_limit_s

    def reason(self) -> int:
        """Number of the reason, see `pulse.REASONS`; 0 to go on."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return heartbeat.REASONS.index("time_limit")
        return heartbeat.here().finish
