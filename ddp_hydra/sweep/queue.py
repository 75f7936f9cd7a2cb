"""Queues the jobs of a sweep: gives them numbers, composes them ahead of time, groups them by cluster."""

from __future__ import annotations

import importlib
import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.config import redact
from ddp_hydra.errors import ClusterError, DdpHydraError
from ddp_hydra.sweep import defaults, planned_job
from ddp_hydra.sweep.composing import CachingConfigLoader
from ddp_hydra.sweep.planned_job import Need, PlannedJob
from ddp_hydra.sweep.rows import Row, State, typed

AHEAD = 16
"""How many jobs are composed before they can start."""


class JobQueue:
    """Holds the jobs that have not started, in Hydra's order.

    Args:
        folder: of the sweep.
        loader: composes configs.
        config: as Hydra composed it without the swept overrides.
        own_need: what the tasks of other apps need.
        earlier: the rows of an earlier run of this sweep; None if this sweep does not resume one.
        retry_failed: whether jobs that failed in the earlier run are run again.

    Attributes:
        jobs: those for the cluster that is up.
        waiting: those that need another cluster.
        keys: the keys that some job gives.
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
        self.is_resumed = earlier is not None
        self.earlier = list(earlier or ())
        for row in self.earlier:
            row.overrides = redact.without(row.overrides)  # earlier versions wrote secrets, too
        self.next_number = max((row.number for row in self.earlier), default=-1) + 1
        self.not_repeated = {State.done, State.stopped} | (set() if retry_failed else {State.failed})
        self.jobs: deque[PlannedJob] = deque()
        self.waiting: deque[PlannedJob] = deque()
        self.keys = dict.fromkeys(key for row in self.earlier for key in typed(row))

    def __bool__(self) -> bool:
        return bool(self.jobs)

    def add(self, overrides: Sequence[str], wanted: int) -> PlannedJob:
        """Return a job; add it to the queue, unless it ended in an earlier run of this sweep.

        Args:
            overrides: of the job.
            wanted: the number that Hydra would give it.
        """
        task_overrides = redact.without(planned_job.without_hydras(overrides))  # rows are written to files
        number, earlier = self._numbered(task_overrides, wanted)
        job = PlannedJob(Row(number, task_overrides, str(number)), overrides, earlier)
        self.keys |= dict.fromkeys(typed(job.row))
        if earlier is not None and (earlier.state in self.not_repeated or planned_job.is_paused(earlier)):
            self.keep_earlier(job)
            job.result = job.earlier_return()
        else:
            self.jobs.append(job)
        return job

    def _numbered(self, overrides: list[str], wanted: int) -> tuple[int, Row | None]:
        """Return a job's number, and its row in an earlier run of the sweep: then it keeps its number."""
        for row in self.earlier:
            if row.overrides == overrides:
                self.earlier.remove(row)
                return row.number, row
        number = max(wanted, self.next_number)
        self.next_number = number + 1
        return number, None

    def keep_earlier(self, job: PlannedJob) -> None:
        """Let a job that need not run, and is not in the queue, keep the row of the earlier run of the sweep."""
        assert job.earlier is not None
        job.row, job.folder = job.earlier, self.folder / job.earlier.folder
        job.is_ours = planned_job.is_ours(self.config)

    def fill_started(self, rows: Sequence[Row]) -> None:
        """Fill in the values that jobs which have started before do not give themselves."""
        for row in rows:
            if row.state != State.queued:
                defaults.fill_from_folder(row, self.keys, self.folder / row.folder)

    def first(self, cluster: str | None) -> PlannedJob | None:
        """Return the next job, composed; it stays in the queue.

        Args:
            cluster: the config of the cluster that is up; jobs that need another one are set aside. None for any.
        """
        while self.jobs:
            job = self.jobs[0]
            if job.row.state == State.failed or (not job.is_composed and not self.compose(job)):
                self.jobs.popleft()
            elif cluster is not None and job.need.cluster != cluster:
                self.waiting.append(self.jobs.popleft())
            else:
                return job
        return None

    def put_first(self, job: PlannedJob, priority: int) -> None:
        """Put a job before those with a lower priority; new jobs have the priority 0."""
        self.remove(job)
        job.priority = priority
        place = next((at for at, other in enumerate(self.jobs) if other.priority < priority), len(self.jobs))
        self.jobs.insert(place, job)

    def remove(self, job: PlannedJob) -> None:
        """Remove a job, if it is in the queue."""
        for jobs in (self.jobs, self.waiting):
            if job in jobs:
                jobs.remove(job)

    def switch_cluster(self) -> bool:
        """Continue with the jobs that were set aside; return False if there are none."""
        self.jobs, self.waiting = self.waiting, deque()
        return bool(self.jobs)

    def compose(self, job: PlannedJob) -> bool:
        """Compose a job; return False if that failed, which is then the job's result."""
        try:
            config = self.loader.take(self.config, job.overrides)
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = str(job.row.number), job.row.number
                config.hydra.sweep.dir = str(self.folder)
            with planned_job.hydra_config_of(config):
                job.row.folder = str(config.hydra.sweep.subdir)
                job.is_ours = planned_job.is_ours(config)
                job.need = planned_job.need_of(config) if job.is_ours else self.own_need
                job.config, job.folder = config, self.folder / job.row.folder
                defaults.fill(job.row, self.keys, config, config.hydra.runtime.choices)
            if job.earlier is not None:
                planned_job.resume(job, job.earlier.wall_s)
            elif self.is_resumed:
                planned_job.take_over_folder(job)
        except (DdpHydraError, HydraException, OmegaConfBaseException) as error:
            job.fail(error)
        if job.is_dry:
            # It imports torch: do that once, before the processes of the jobs are forked.
            importlib.import_module("ddp_hydra.training.dry_run")
        return job.row.state != State.failed

    def compose_ahead(self) -> bool:
        """Compose one of the next jobs, so that it can start at once later; return False if all are composed."""
        for job in itertools.islice(self.jobs, AHEAD):
            if not job.is_composed and job.row.state == State.queued:
                return self.compose(job)
        return False

    def fail_all_on(self, cluster: str, error: ClusterError) -> None:
        """Fail all jobs that need a cluster that cannot be brought up.

        Args:
            cluster: its config.
            error: the reason.
        """
        for job in self.jobs:
            if (job.is_composed or self.compose(job)) and job.need.cluster == cluster:
                job.fail(error)
        self.jobs = deque(job for job in self.jobs if job.row.state != State.failed)
