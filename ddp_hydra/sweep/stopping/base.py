"""The calls that a sweep makes to whatever stops its jobs; this base class stops none."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hydra.sweep.planned_job import PlannedJob
from ddp_hydra.sweep.rows import State


class Stopping:
    """Stop no job.

    Attributes:
        state_at_end: of a job that has ended well, before anything is decided about it.
    """

    state_at_end = State.done

    def add(self, jobs: Sequence[PlannedJob]) -> None:
        """Take over the jobs of a batch. Those that need not run are removed from the queue."""

    def before_start(self, job: PlannedJob) -> None:
        """Prepare a job that starts now."""

    def poll(self) -> None:
        """Read what running jobs have reported, and decide."""

    def on_end(self, job: PlannedJob) -> None:
        """Decide about a job whose process has ended; its row says how. Not called when the sweep is being stopped."""

    def end_batch(self) -> bool:
        """Settle the jobs of a batch when nothing is left to run; return whether some have to run on first."""
        return False
