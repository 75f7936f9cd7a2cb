"""Which ranks are alive and getting on, as far as the client can tell: pure bookkeeping over their beats."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddp_hydra.dispatch.placement import ranges
from ddp_hydra.heartbeat import PHASES, UNREADY, Place

GAP_S = 2.0
"""A watcher that looked away for longer (a laptop that slept, a breakpoint) gives everyone that time."""
DOING = {
    "join": "joining the process group", "start": "setting up", "load": "loading data", "forward": "the forward pass",
    "backward": "the backward pass", "update": "the optimizer's update", "log": "averaging metrics",
    "validate": "validation", "save": "saving a checkpoint", "end": "leaving the process group",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Beat:
    """What a relay says of its rank about once a second.

    Args:
        place: where the rank is.
        age_s: how long it has not moved from there.
        stopped: its process is suspended (SIGSTOP, a debugger).
        at_s: when it was heard, on the client's clock.
        saving: it has a checkpoint under way.
    """

    place: Place
    age_s: float
    stopped: bool
    at_s: float
    saving: bool = False

    @classmethod
    def of(cls, data: Mapping[str, Any], now: float) -> Beat:
        """Read a beat record; it comes from a rank's host, so odd values become harmless ones."""
        step, age_s, phase = data.get("step"), data.get("age_s"), data.get("phase")
        step = step if isinstance(step, int) and 0 <= step < 2**63 else 0
        age_s = float(age_s) if isinstance(age_s, (int, float)) and 0 <= age_s < 1e9 else 0.0
        phase = phase if phase in PHASES else "run"
        place, stopped = Place(0, step, phase, bool(data.get("first"))), bool(data.get("stopped"))
        return cls(place, age_s, stopped, now, bool(data.get("saving")))

    def stuck_s(self, now: float) -> float:
        """How long the rank has not moved."""
        return self.age_s + now - self.at_s


@dataclass(frozen=True, slots=True)
class Hang:
    """A gang that makes no progress.

    Args:
        rank: the one that holds up the others.
        message: what a person should read.
    """

    rank: int
    message: str


WAITS = re.compile(r"/torch/|/ddp_hydra/training/consensus\.py")
"""Where a rank is that waits for others: in a collective, or in the backward pass, which has them inside."""


def waits(stacks: str) -> bool:
    """Whether a rank waits for others, by the stacks that `faulthandler` printed; the main thread's is the last.

    Args:
        stacks: of all its threads.
    """
    innermost = stacks.rpartition("(most recent call first):")[2].lstrip().partition("\n")[0]
    return bool(WAITS.search(innermost))


class HealthMonitor:
    """What is known of each rank's life.

    Args:
        lost_timeout_s: nothing heard for so long means that the worker is gone.
        hang_timeout_s: no progress for so long means that the rank hangs.
        first_step_timeout_s: the same where a rank is in a phase for the first time.
        join_timeout_s: the same where it joins the others.

    Attributes:
        away_s: the longest time that the watcher did not look, because this process was suspended.
    """

    def __init__(
        self, lost_timeout_s: float, hang_timeout_s: float, first_step_timeout_s: float, join_timeout_s: float
    ) -> None:
        self.lost_timeout_s = lost_timeout_s
        self.hang_timeout_s = hang_timeout_s
        self.first_step_timeout_s = max(first_step_timeout_s, hang_timeout_s)
        self.join_timeout_s = join_timeout_s
        self.heard_s: dict[int, float] = {}
        self.beats: dict[int, Beat] = {}
        self.looked_s: float | None = None
        self.excused_s = -math.inf
        self.away_s = 0.0

    def hear(self, rank: int, now: float) -> None:
        """Note that a rank's relay has said something."""
        self.heard_s[rank] = now

    def beat(self, rank: int, data: Mapping[str, Any], now: float) -> None:
        """Note where a rank is."""
        self.beats[rank] = Beat.of(data, now)

    def look(self, now: float) -> None:
        """Note that the watcher looks; time that it did not look is nobody's fault."""
        gap_s = now - self.looked_s if self.looked_s is not None else 0.0
        self.away_s = max(self.away_s, gap_s)
        if gap_s > GAP_S:
            self.heard_s = {rank: min(at_s + gap_s, now) for rank, at_s in self.heard_s.items()}
            self.beats = {rank: replace(beat, at_s=min(beat.at_s + gap_s, now)) for rank, beat in self.beats.items()}
        self.looked_s = now

    def excuse(self, now: float) -> None:
        """Note that ranks may be waiting for the client: that they stood still until now says nothing."""
        self.excused_s = now

    def stuck_s(self, beat: Beat, now: float) -> float:
        """How long a rank has not moved, as far as that is its own affair."""
        return min(beat.stuck_s(now), now - self.excused_s)

    def silent(self, running: Collection[int], now: float) -> list[int]:
        """The ranks of `running` from whose host nothing has been heard for too long."""
        return self.overdue(running, now, self.lost_timeout_s)

    def overdue(self, running: Collection[int], now: float, after_s: float) -> list[int]:
        """The ranks of `running` of which nothing has been heard for so long."""
        return [rank for rank in running if rank in self.heard_s and now - self.heard_s[rank] > after_s]

    def hang(self, running: Collection[int], now: float, waiting: Collection[int] = ()) -> Hang | None:
        """The rank that holds up the others, if it has not moved for too long.

        Ranks wait for each other in every step, so the one that is least far is the one the others wait for.

        Args:
            running: the ranks that have not ended.
            now: the time.
            waiting: those of which it is known that they wait for others.
        """
        beats = {rank: self.beats[rank] for rank in running if rank in self.beats}
        if len(beats) < len(running) or any(beat.place.phase == "run" for beat in beats.values()):
            return None
        # Those who are done wait for the others, and only when all are, for each other.
        judged = {rank: beat for rank, beat in beats.items() if beat.place.phase != "end"} or beats
        if not judged:
            return None
        # Where several are at one place, a suspended process is the likelier cause, and then one that does not wait.
        rank = min(judged, key=lambda rank: (judged[rank].place.order, not judged[rank].stopped, rank in waiting, rank))
        beat = judged[rank]
        # Of all: who has long waited for one that has just gone on will go on, too, and say so with its next beat.
        if min(self.stuck_s(other, now) for other in judged.values()) <= self.limit_s(beat):
            return None
        return Hang(rank, self._say(rank, beat, self.stuck_s(beat, now), judged))

    def limit_s(self, beat: Beat) -> float:
        """How long a rank may stay where it is."""
        if beat.stopped or not beat.place.first or beat.place.phase == "end":
            return self.hang_timeout_s
        return self.join_timeout_s if beat.place.phase == "join" else self.first_step_timeout_s

    def _say(self, rank: int, beat: Beat, stuck_s: float, judged: Mapping[int, Beat]) -> str:
        where = f"in {DOING[beat.place.phase]}" + (f" of step {beat.place.step}" if beat.place.step else "")
        same = [other for other, its in judged.items() if its.place.order == beat.place.order and other != rank]
        ahead = [other for other, its in judged.items() if its.place.order > beat.place.order]
        why = "its process is suspended (SIGSTOP, or a debugger); " if beat.stopped else ""
        others = []
        if same:
            others.append(f"rank {ranges(same)} stand{'' if len(same) > 1 else 's'} at the same place")
        if len(same) == len(judged) - 1 > 0 and not beat.stopped:
            others.append("they may all wait for each other: look at the network between their hosts")
        if ahead:
            others.append(f"rank {ranges(ahead)} wait{'' if len(ahead) > 1 else 's'} for it further on")
        said = f"hangs: no progress for {stuck_s:.0f} s {where}; {why}{'; '.join(others)}"
        return said.rstrip("; ") + "; the stack of every rank is in its log"

    def in_loop(self, running: Collection[int]) -> bool:
        """Whether all ranks run a loop that looks at what is asked of it."""
        return all(rank in self.beats and self.beats[rank].place.phase not in UNREADY for rank in running)

    def saving(self, running: Collection[int]) -> list[int]:
        """The ranks of `running` that have a checkpoint under way."""
        return [rank for rank in running if rank in self.beats and self.beats[rank].saving]

    @property
    def steps_done(self) -> int:
        """Optimizer steps that the gang is known to have done."""
        return max((beat.place.steps_done for beat in self.beats.values()), default=0)
