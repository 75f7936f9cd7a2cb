"""Decides whether a gang that failed gets another attempt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddp_hydra.errors import Failure
from ddp_hydra.run_state import AttemptEntry, FailureEntry

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*")
OWN_FAULT = ("raised", "exited", "killed")
"""Kinds of failures that the rank caused itself. Others, such as a lost worker, say little about the next attempt."""
FROM_OUTSIDE = ("killed by SIGKILL", "killed by SIGTERM")
"""Beginnings of messages: memory that ran out on a host, or a host that is taken away, strikes anywhere."""


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

    Attributes:
        ended: the attempts that failed.
        used: how many of them count: planned ends of workers do not.
        are_known: of each, whether its ranks have said how far they were; a user's own function need not.
    """

    most: int
    ended: list[AttemptEntry] = field(default_factory=list)
    used: int = 0
    are_known: list[bool] = field(default_factory=list)

    def note(self, entry: AttemptEntry, failure: Failure, is_planned: bool = False) -> str | None:
        """Note a failed attempt; return why there is no other one, or None if there is."""
        self.ended.append(entry)
        self.used += not is_planned
        self.are_known.append(entry.steps_done > 0 or failure.phase != "run")
        if self.most == 0 or failure.mistake:
            return ""
        is_first = len(self.ended) == 1 and not entry.steps_done
        if failure.deterministic and is_first and self.are_known[0]:
            return "the code of the job raised this before the first step was done: it was not tried again"
        why_not = repeated(self.ended)
        if why_not and all(self.are_known[-2:]):
            return why_not
        if self.used > self.most:
            return f"all {self.most} restarts of dispatch.max_restarts={self.most} are used up"
        return None
