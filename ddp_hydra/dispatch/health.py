"""Decides which ranks are alive and make progress, and whether a failed gang is started again; it does no I/O."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_hydra.console.text import ranges
from ddp_hydra.errors import Failure, FailureKind, RankFailed, explain, root_cause
from ddp_hydra.heartbeat import UNREADY
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.record import Beat, End
from ddp_hydra.run_state import AttemptEntry, FailureEntry

GAP_S = 2.0
"""Seconds without a look after which this process counts as suspended (a laptop that slept, a breakpoint)."""
SUSPENDED_S = 30.0
"""Seconds for which a suspended rank may hold up a job that is asked to end; batch systems give about as long."""
ACTIVITY = {
    "join": "joining the process group", "start": "setting up", "load": "loading data", "forward": "the forward pass",
    "backward": "the backward pass", "update": "the optimizer's update", "log": "averaging metrics",
    "validate": "validation", "save": "saving a checkpoint", "end": "leaving the process group",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hang:
    """Describes a gang that makes no progress: the rank that holds up the others, and a message for the user."""

    rank: int
    message: str


WAITS = re.compile(r"/torch/|/ddp_hydra/(rank/world|training/(consensus|parallel/shared_memory))\.py")
"""Files in which a rank waits for others: in a collective, or in the backward pass, which contains collectives."""


def waits(stacks: str) -> bool:
    """Return whether a rank waits for others, by the stacks that `faulthandler` printed; the main thread's is last."""
    innermost = stacks.rpartition("(most recent call first):")[2].lstrip().partition("\n")[0]
    return bool(WAITS.search(innermost))


class HealthMonitor:
    """Keeps the last message and the last heartbeat of each rank.

    Args:
        hang_timeout_s: seconds without progress after which a rank hangs.
        first_step_timeout_s: the same for a rank that is in a phase for the first time.
        join_timeout_s: the same for a rank that joins the process group.

    Attributes:
        arrived_s: when each heartbeat arrived, on this process's clock.
        away_s: the longest time between two looks, in which this process was suspended.
        is_ending: whether the ranks are asked to save and end.
    """

    def __init__(self, hang_timeout_s: float, first_step_timeout_s: float, join_timeout_s: float) -> None:
        self.hang_timeout_s = hang_timeout_s
        self.first_step_timeout_s = max(first_step_timeout_s, hang_timeout_s)
        self.join_timeout_s = join_timeout_s
        self.last_message_s: dict[int, float] = {}
        self.heartbeats: dict[int, Beat] = {}
        self.arrived_s: dict[int, float] = {}
        self.looked_s: float | None = None
        self.excused_s = -math.inf
        self.away_s, self.is_ending = 0.0, False

    def note_message(self, rank: int, now: float) -> None:
        self.last_message_s[rank] = now

    def note_heartbeat(self, rank: int, beat: Beat, now: float) -> None:
        self.heartbeats[rank], self.arrived_s[rank] = beat, now

    def look(self, now: float) -> None:
        """Note that the client checks now; do not count time against ranks in which it did not."""
        gap_s = now - self.looked_s if self.looked_s is not None else 0.0
        self.away_s = max(self.away_s, gap_s)
        if gap_s > GAP_S:
            self.last_message_s = {rank: min(at_s + gap_s, now) for rank, at_s in self.last_message_s.items()}
            self.arrived_s = {rank: min(at_s + gap_s, now) for rank, at_s in self.arrived_s.items()}
        self.looked_s = now

    def excuse(self, now: float) -> None:
        """Note that ranks may have been waiting for the client until now, so that they do not count as stuck."""
        self.excused_s = now

    def stuck_s(self, rank: int, now: float) -> float:
        return min(self.heartbeats[rank].age_s + now - self.arrived_s[rank], now - self.excused_s)

    def overdue(self, running: Collection[int], now: float, after_s: float) -> list[int]:
        return [rank for rank in running if rank in self.last_message_s and now - self.last_message_s[rank] > after_s]

    def hang(self, running: Collection[int], now: float, waiting: Collection[int] = ()) -> Hang | None:
        beats = {rank: self.heartbeats[rank] for rank in running if rank in self.heartbeats}
        if len(beats) < len(running) or any(beat.phase == "run" for beat in beats.values()):
            return None
        # Ranks that are done wait for the others; only when all are done, they wait for each other.
        judged = {rank: beat for rank, beat in beats.items() if beat.phase != "end"} or beats
        if not judged:
            return None
        # Of several ranks at one place, the cause is more likely a suspended one, and then one that does not wait.
        rank = min(judged, key=lambda rank: (judged[rank].order, not judged[rank].stopped, rank in waiting, rank))
        beat = judged[rank]
        # The minimum of all: ranks that waited for one that has just moved on will move with their next heartbeat.
        if min(self.stuck_s(other, now) for other in judged) <= self.limit_s(beat):
            return None
        return Hang(rank, self._message(rank, self.stuck_s(rank, now), judged))

    def limit_s(self, beat: Beat) -> float:
        if beat.stopped and self.is_ending:
            return min(self.hang_timeout_s, SUSPENDED_S)
        if beat.stopped or not beat.first or beat.phase == "end":
            return self.hang_timeout_s
        return self.join_timeout_s if beat.phase == "join" else self.first_step_timeout_s

    def _message(self, rank: int, stuck_s: float, judged: Mapping[int, Beat]) -> str:
        beat = judged[rank]
        where = f"in {ACTIVITY[beat.phase]}" + (f" of step {beat.step}" if beat.step else "")
        same = [other for other, its in judged.items() if its.order == beat.order and other != rank]
        ahead = [other for other, its in judged.items() if its.order > beat.order]
        why = "its process is suspended (SIGSTOP, or a debugger); " if beat.stopped else ""
        others = []
        if same:
            others.append(f"rank {ranges(same)} stand{'' if len(same) > 1 else 's'} at the same place")
        if len(same) == len(judged) - 1 > 0 and not beat.stopped and beat.phase != "load":
            others.append("they may all wait for each other: look at the network between their hosts")
        if ahead:
            others.append(f"rank {ranges(ahead)} wait{'' if len(ahead) > 1 else 's'} for it further on")
        text = f"hangs: no progress for {stuck_s:.0f} s {where}; {why}{'; '.join(others)}"
        return text.rstrip("; ") + "; the stack of every rank is in its log"

    def in_loop(self, running: Collection[int]) -> bool:
        return all(rank in self.heartbeats and self.heartbeats[rank].phase not in UNREADY for rank in running)

    def saving(self, running: Collection[int]) -> list[int]:
        return [rank for rank in running if rank in self.heartbeats and self.heartbeats[rank].saving]

    @property
    def steps_done(self) -> int:
        return max((beat.steps_done for beat in self.heartbeats.values()), default=0)


# -- ranks of an attempt ---------------------------------------------------------------------------------


class RankStates:
    """Tracks the ranks of one attempt; `health` knows where each one was last."""

    def __init__(self, specs: list[RankSpec], attempt: int, health: HealthMonitor) -> None:
        self.specs, self.attempt, self.health = specs, attempt, health
        self.started: set[int] = set()
        self.ended: set[int] = set()
        self.failures: list[Failure] = []

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.specs)

    @property
    def running(self) -> list[int]:
        return [spec.rank for spec in self.specs if spec.rank not in self.ended]

    @property
    def late(self) -> list[int]:
        return [spec.rank for spec in self.specs if spec.rank not in self.started]

    @property
    def cause_is_known(self) -> bool:
        return not all(failure.is_symptom for failure in self.failures)

    def end(self, rank: int, end: End, was_stopped: bool) -> bool:
        """Note how a rank ended; return False if that was known before."""
        if rank in self.ended:
            return False
        spec = self.specs[rank]
        if end.failure is not None:
            self.failures.append(end.failure.of_rank(rank, spec.host, self.attempt, end.step, end.phase))
        elif end.stopped and not was_stopped:
            self.fail(spec, "lost", f"it was stopped by its worker {spec.worker}, which is shut down")
        self.ended.add(rank)
        return True

    def fail(self, spec: RankSpec, kind: FailureKind, message: str, ended: bool = True) -> None:
        self.failures.append(self.failure(kind, spec, message))
        if ended:
            self.ended.add(spec.rank)

    def failure(self, kind: FailureKind, spec: RankSpec, message: str, **more: Any) -> Failure:
        beat = self.health.heartbeats.get(spec.rank)
        seen: dict[str, Any] = {"step": beat.step, "phase": beat.phase} if beat else {}
        seen = {"time_s": time.time(), **seen, **more}
        return Failure(kind, spec.rank, spec.host, message, attempt=self.attempt, **seen)

    def error(self) -> RankFailed:
        cause, symptoms = root_cause(self.failures)
        return RankFailed(explain(cause, symptoms), cause, symptoms)


_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*")
OWN_FAULT = ("raised", "exited", "killed")
"""Kinds of failures that the rank caused itself. Others, such as a lost worker, say little about the next attempt."""
FROM_OUTSIDE = ("killed by SIGKILL", "killed by SIGTERM")
"""Beginnings of messages: memory that ran out on a host, or a host that is taken away, strikes anywhere."""


def repeated(attempts: Sequence[AttemptEntry]) -> str | None:
    """Return why there should be no other attempt: the last two have failed alike; else None."""
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
