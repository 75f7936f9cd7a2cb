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


@dataclass(frozen=True, slots=True)
class Ended:
    """Describes an attempt that failed.

    Args:
        attempt: its number.
        world_size: its number of ranks.
        steps_done: number of optimizer steps that were done before.
        started: when it began, in seconds since 1970.
        wall_s: how many seconds it took.
        failure: the root cause.
    """

    attempt: int
    world_size: int
    steps_done: int
    started: float
    wall_s: float
    failure: Failure

    def entry(self) -> AttemptEntry:
        """Return the entry of summary.json."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        return AttemptEntry(**own | {"failure": FailureEntry(**self.failure.as_dict())})


def repeated(attempts: Sequence[AttemptEntry]) -> str | None:
    """Return why there should be no other attempt: the last two have failed alike.

    Args:
        attempts: entries of summary.json.

    Returns:
        A sentence; None if they differ, or if there are fewer.
    """
    last = [entry.failure or FailureEntry() for entry in attempts[-2:]]
    if len(last) < 2 or any(failure.kind not in OWN_FAULT for failure in last):
        return None
    # Numbers in messages, such as addresses, process ids and times, make no other failure.
    before, now = ((it.kind, it.step or 0, _NUMBERS.sub("0", it.message)) for it in last)
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
    ended: list[Ended] = field(default_factory=list)

    def note(self, ended: Ended) -> str | None:
        """Note a failed attempt; return why there is no other one, or None if there is."""
        self.ended.append(ended)
        if self.most == 0 or ended.failure.mistake:
            return ""
        if ended.failure.deterministic and len(self.ended) == 1 and not ended.steps_done:
            return "the code of the job raised this before the first step was done: it was not tried again"
        if why_not := repeated([one.entry() for one in self.ended]):
            return why_not
        if len(self.ended) > self.most:
            return f"all {self.most} restarts of dispatch.max_restarts={self.most} are used up"
        return None
