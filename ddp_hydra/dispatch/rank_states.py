"""What is known of each rank of an attempt: begun, ended, returned, failed, and where it was last seen."""

from __future__ import annotations

import time
from typing import Any

from ddp_hydra.dispatch.health import HealthMonitor
from ddp_hydra.errors import Failure, JobFailed, RankFailed
from ddp_hydra.rank.failure import explain, root_cause
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.results import Record


class RankStates:
    """The ranks of one attempt, as the client has heard of them.

    Args:
        specs: the ranks' places.
        attempt: which start of the gang it is.
        health: what tells silence, hangs and progress.
    """

    def __init__(self, specs: list[RankSpec], attempt: int, health: HealthMonitor) -> None:
        self.specs, self.attempt, self.health = specs, attempt, health
        self.started: set[int] = set()
        self.ended: set[int] = set()
        self.failures: list[Failure] = []

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended. It is asked at each record, so it does not look at each rank."""
        return len(self.ended) == len(self.specs)

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [spec.rank for spec in self.specs if spec.rank not in self.ended]

    @property
    def late(self) -> list[int]:
        """The ranks that have not begun."""
        return [spec.rank for spec in self.specs if spec.rank not in self.started]

    @property
    def cause_is_known(self) -> bool:
        """Whether some failure is more than an echo."""
        return not all(failure.is_symptom for failure in self.failures)

    def end(self, record: Record, was_stopped: bool) -> bool:
        """Note how a rank ended; False where that was known before.

        Args:
            record: of kind "end".
            was_stopped: by us.
        """
        if record.rank in self.ended:
            return False
        spec = self.specs[record.rank]
        failure = Failure.from_end(record.data, spec.rank, spec.host, self.attempt)
        if record.data.get("status") == "stopped" and not was_stopped:
            failure = self.failure("lost", spec, f"it was stopped by its worker {spec.worker}, which is shut down")
        if failure is not None:
            self.failures.append(failure)
        self.ended.add(record.rank)
        return True

    def fail(self, spec: RankSpec, kind: str, message: str, ended: bool = True) -> None:
        """Note a failure that the rank itself cannot tell."""
        self.failures.append(self.failure(kind, spec, message))
        if ended:
            self.ended.add(spec.rank)

    def lose(self, worker: str, how: str) -> None:
        """A worker is gone, and with it the rank that it hosted."""
        for spec in self.specs:
            if spec.worker == worker and spec.rank not in self.ended:
                self.fail(spec, "lost", how)

    def failure(self, kind: str, spec: RankSpec, message: str, **more: Any) -> Failure:
        """A failure of now, with where the rank was last seen."""
        beat = self.health.beats.get(spec.rank)
        seen: dict[str, Any] = {"step": beat.place.step, "phase": beat.place.phase} if beat else {}
        seen = {"time_s": time.time(), **seen, **more}
        return Failure(kind, spec.rank, spec.host, message, attempt=self.attempt, **seen)

    def error(self) -> JobFailed:
        """The one error that names the first cause."""
        cause, symptoms = root_cause(self.failures)
        return RankFailed(explain(cause, symptoms), cause, symptoms)
