"""Tracks for each rank of an attempt whether it has started, ended or failed."""

from __future__ import annotations

import time
from typing import Any

from ddp_hydra.dispatch.health import HealthMonitor
from ddp_hydra.errors import Failure, FailureKind, RankFailed, explain, root_cause
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.record import End


class RankStates:
    """Tracks the ranks of one attempt.

    Args:
        specs: the ranks' places.
        attempt: its number.
        health: knows where each rank was last.
    """

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
        seen: dict[str, Any] = {"step": beat.place.step, "phase": beat.place.phase} if beat else {}
        seen = {"time_s": time.time(), **seen, **more}
        return Failure(kind, spec.rank, spec.host, message, attempt=self.attempt, **seen)

    def error(self) -> RankFailed:
        cause, symptoms = root_cause(self.failures)
        return RankFailed(explain(cause, symptoms), cause, symptoms)
