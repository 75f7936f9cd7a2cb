"""The jobs of a sweep that have not begun: numbered, composed before it is their turn, kept apart by cluster."""

from __future__ import annotations

import importlib
import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.errors import ClusterError, DdpHydraError
from ddp_hydra.sweep import job_returns, planned_job
from ddp_hydra.sweep.planned_job import CachingConfigLoader, Need, PlannedJob
from ddp_hydra.sweep.rows import Row, State

AHEAD = 16
"""Jobs that are composed before there is a place for them."""


class Queue:
    """Jobs in the order in which Hydra has given them.

    Args:
        folder: of the sweep.
        loader: composes configs.
        config: as Hydra composed it without the swept overrides.
        own_need: of tasks that are not ours.
        earlier: the rows that an earlier start has left in the folder; None where it does not go on with them.
        retry_failed: jobs that have failed then are run again.
    """

    def __init__(
        self,
        folder: Path,
        loader: CachingConfigLoader,
        config: DictConfig,
        own_need: Need,
        earlier: Sequence[Row] | None,
        retry_failed: bool,
    ) -> None:
        self.folder, self.loader, self.config, self.own_need = folder, loader, config, own_need
        self.goes_on = earlier is not None
        self.numbers = planned_job.Numbers(earlier or [])
        self.over = {State.done} if retry_failed else {State.done, State.failed}
        self.jobs: deque[PlannedJob] = deque()
        self.later: deque[PlannedJob] = deque()

    def __bool__(self) -> bool:
        return bool(self.jobs)

    def enter(self, overrides: Sequence[str], wanted: int) -> PlannedJob:
        """Let a job in, unless it had its end when the sweep was started before.

        Args:
            overrides: of the job.
            wanted: the number that Hydra would give it.
        """
        task_overrides = planned_job.of_task(overrides)
        number, earlier = self.numbers.of(task_overrides, wanted)
        job = PlannedJob(Row(number, task_overrides, str(number)), overrides, earlier)
        if earlier is not None and earlier.state in self.over:
            job.row, job.folder, job.is_ours = earlier, self.folder / earlier.folder, planned_job.is_ours(self.config)
            job.result = job_returns.of_before(job)
        else:
            self.jobs.append(job)
        return job

    def first(self, cluster: str | None) -> PlannedJob | None:
        """Return the job whose turn it is, composed.

        Args:
            cluster: the one that is up; jobs that need another stand aside. None where any will do.
        """
        while self.jobs:
            job = self.jobs[0]
            if job.row.state == State.failed or (not job.is_composed and not self.compose(job)):
                self.jobs.popleft()
            elif cluster is not None and job.need.cluster != cluster:
                self.later.append(self.jobs.popleft())
            else:
                return job
        return None

    def take(self) -> PlannedJob:
        """Take out the first."""
        return self.jobs.popleft()

    def turn(self) -> bool:
        """Go on with the jobs that stood aside; False where there are none."""
        self.jobs, self.later = self.later, deque()
        return bool(self.jobs)

    def compose(self, job: PlannedJob) -> bool:
        """Compose a job; one that cannot be has failed."""
        try:
            job.compose(self.loader, self.config, self.own_need, self.folder)
            if job.earlier is not None:
                planned_job.go_on(job)
            elif self.goes_on:
                planned_job.refuse_foreign_folder(job)
        except (DdpHydraError, HydraException, OmegaConfBaseException) as error:
            job.fail(error)
        if job.is_dry:
            importlib.import_module(
                "ddp_hydra.training.dry_run"
            )  # once, for all the processes to come: it takes torch along
        return job.row.state != State.failed

    def compose_ahead(self) -> bool:
        """Compose one of those that come next, so that none has to wait for it; False where all are."""
        for job in itertools.islice(self.jobs, AHEAD):
            if not job.is_composed and job.row.state == State.queued:
                return self.compose(job)
        return False

    def fail_all_on(self, cluster: str, error: ClusterError) -> None:
        """A cluster cannot be had, so none of the jobs that need it can be run."""
        for job in self.jobs:
            if (job.is_composed or self.compose(job)) and job.need.cluster == cluster:
                job.fail(error)
        self.jobs = deque(job for job in self.jobs if job.row.state == State.queued)
