"""Whether a gang that failed is worth another attempt."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ddp_hydra.errors import Failure

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*")
OWN_FAULT = ("raised", "exited", "killed")
"""What a rank does to itself; a lost worker or a hang says little about the next attempt."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that failed.

    Args:
        attempt: its number.
        world_size: its ranks.
        steps_done: optimizer steps done when it failed.
        failure: the root cause.
        wall_s: how long it took.
    """

    attempt: int
    world_size: int
    steps_done: int
    failure: Failure
    wall_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """What summary.json shows."""
        return {
            "attempt": self.attempt,
            "world_size": self.world_size,
            "steps_done": self.steps_done,
            "wall_s": self.wall_s,
            "failure": self.failure.as_dict(),
        }

    def cause(self) -> tuple[str, int, str]:
        """What makes two failures the same one: addresses, process ids and times differ anyway."""
        return self.failure.kind, self.failure.step, _NUMBERS.sub("0", self.failure.message)


@dataclass
class Restarts:
    """The budget of a job, and what it was spent on.

    Args:
        most: new attempts allowed.
    """

    most: int
    ended: list[Ended] = field(default_factory=list)

    def note(self, ended: Ended) -> str | None:
        """Note a failed attempt; returns why there shall be no other, None where there shall."""
        before = self.ended[-1] if self.ended else None
        self.ended.append(ended)
        if self.most == 0 or ended.failure.mistake:
            return ""
        if ended.failure.deterministic and not before and not ended.steps_done:
            return "the project's own code raised this before the first step was done: it was not tried again"
        if before and ended.failure.kind in OWN_FAULT and before.cause() == ended.cause():
            where = f"in step {ended.failure.step}" if ended.failure.step else "before the first step"
            return f"the same failure {where} in two attempts running: it was not tried again"
        if len(self.ended) > self.most:
            return f"all {self.most} restarts of dispatch.max_restarts={self.most} are used up"
        return None
