"""Decides whether a gang that failed gets another attempt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from ddp_hydra.errors import Failure
from ddp_hydra.run_state import AttemptEntry, FailureEntry

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*")
OWN_FAULT = ("raised", "exited", "killed")
"""Kinds of failures that the rank caused itself. Others, such as a lost worker, say little about the next attempt."""
FROM_OUTSIDE = ("killed by SIGKILL", "killed by SIGTERM")
"""Beginnings of messages: memory that ran out on a host, or a host that is taken away, strikes anywhere."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """Describes an attempt that failed.

    Args:
        attempt: its number.
        world_size: its number of ranks.
        steps_done: number of optimizer steps that were done before.
        started: when it began, in seconds since 1970.
        wall_s: how many seconds it took.
        failure: the root cause.
        is_planned: its worker had said before that it would be shut down.
    """

    attempt: int
    world_size: int
    steps_done: int
    started: float
    wall_s: float
    failure: Failure
    is_planned: bool = False

    @property
    def steps_are_known(self) -> bool:
        """Whether the ranks have said how far they were: a user's own function need not."""
        return self.steps_done > 0 or self.failure.phase != "run"

    def entry(self) -> AttemptEntry:
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "is_planned"}
        return AttemptEntry(**own | {"failure": FailureEntry(**self.failure.as_dict())})


def repeated(attempts: Sequence[AttemptEntry]) -> str | None:
    """Return why there should be no other attempt: the last two have failed alike.

    Returns:
        A sentence; None if they differ, or if there are fewer.
    """
    last = [(entry.failure or FailureEntry(), entry.steps_done) for entry in attempts[-2:]]
    own = [one for one, _ in last if one.kind in OWN_FAULT and not one.message.startswith(FROM_OUTSIDE)]
    if len(own) < 2:
        return None
    # Numbers in messages, such as addresses, process ids and times, make no other failure.
    before, now = ((it.kind, it.step or done, _NUMBERS.sub("0", it.message)) for it, done in last)
    if before != now:
        return None
    where = f"in step {now[1]}" if now[1] else "before the first step"
    return f"the same failure {where} in two attempts running: it was not tried again"


@dataclass
class Restarts:
    """Counts the restarts of a job.

    Args:
        most: number of restarts that are allowed.
        ended: the attempts that failed.
    """

    most: int
    ended: list[FailedAttempt] = field(default_factory=list)

    def note(self, ended: FailedAttempt) -> str | None:
        """Note a failed attempt; return why there is no other one, or None if there is."""
        self.ended.append(ended)
        if self.most == 0 or ended.failure.mistake:
            return ""
        is_first = len(self.ended) == 1 and not ended.steps_done
        if ended.failure.deterministic and is_first and ended.steps_are_known:
            return "the code of the job raised this before the first step was done: it was not tried again"
        why_not = repeated([one.entry() for one in self.ended])
        if why_not and all(one.steps_are_known for one in self.ended[-2:]):
            return why_not
        if self.used > self.most:
            return f"all {self.most} restarts of dispatch.max_restarts={self.most} are used up"
        return None

    @property
    def used(self) -> int:
        """Return the number of failures that count: planned ends of workers do not."""
        return sum(not one.is_planned for one in self.ended)
