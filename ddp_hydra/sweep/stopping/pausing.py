"""Runs the jobs of a sweep from pause to pause, and lets the best go on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from omegaconf import DictConfig, open_dict

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep import planned_job
from ddp_hydra.sweep.planned_job import PlannedJob
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import Objective, State
from ddp_hydra.sweep.stopping.base import ENDS, Stopping
from ddp_hydra.sweep.stopping.reports import ReportFile
from ddp_hydra.sweep.stopping.rungs import Rungs, Standing

log = logging.getLogger(__name__)
PAUSES_ITSELF = (
    "hydra.launcher.stop=asha and hyperband pause jobs themselves: leave out trainer.pause_after_validations and "
    "hydra/sweeper=pbt, or give another rule"
)


class Pausing(Stopping):
    """Applies rungs to the jobs of a sweep.

    Args:
        rungs: rank the jobs.
        queue: of the sweep; jobs that go on are put at its front.
        objective: see `Stopping`, as for `config`.

    Raises:
        ConfigError: the jobs pause by themselves.
    """

    def __init__(self, rungs: Rungs, queue: JobQueue, objective: Objective, config: DictConfig) -> None:
        if config.trainer.pause_after_validations is not None:
            raise ConfigError(PAUSES_ITSELF)
        super().__init__(queue, objective, config)
        self.rungs = rungs

    def add(self, jobs: Sequence[PlannedJob]) -> None:
        """Take over a batch; jobs of an earlier run of the sweep stand where they were.

        Raises:
            ConfigError: the jobs pause by themselves.
        """
        if any("pause_after_validations" in override for job in jobs for override in job.overrides):
            raise ConfigError(PAUSES_ITSELF)
        for job in self._taken_over(jobs):
            number = job.row.number
            self.rungs.add(number, self._values(number), ENDS.get(job.row.state, ""))
        self._let_go_on(self.rungs.advance())
        for job in jobs:
            if job.row.state not in ENDS and not self.rungs.must_run(job.row.number):
                self.queue.remove(job)
                self.queue.keep_earlier(job)  # it has reports, so there is one
                job.row.state = State.paused

    def before_start(self, job: PlannedJob) -> None:
        """Tell a job where to pause; one that has paused resumes."""
        with open_dict(job.config):
            job.config.trainer.pause_after_validations = self.rungs.goal(job.row.number)
        if job.row.state == State.paused:
            planned_job.resume(job, job.row.wall_s)
        self._set_length(job)

    def poll(self) -> None:
        """Take over the jobs that have failed before they began."""
        failed = [job for job in self.queue.jobs if job.row.state == State.failed]
        for job in failed:
            self.queue.remove(job)
        for number, job in self.jobs.items():
            if job.row.state == State.failed and not self.rungs.trials[number].end:
                self.on_end(job)

    def on_end(self, job: PlannedJob) -> None:
        """Rank the results that are in, and let the best go on."""
        number, file = job.row.number, ReportFile(job.folder, self.objective.metric, job.is_ours)
        file.read()
        self.reports[number] = file.reports
        self.rungs.update(number, self._values(number), ENDS.get(job.row.state, ""))
        self._let_go_on(self.rungs.advance())

    def end_batch(self) -> bool:
        """Stop the jobs that are paused, once one has come to its end: no more results come."""
        while (best := self.rungs.finish()) is not None:
            self._let_go_on([best, *self.rungs.advance()])
            if self.queue:
                return True
        for standing in self.rungs.stop_rest():
            job, count = self.jobs[standing.number], len(self.reports[standing.number])
            where = f"stopped at {self._place(job, count)}, rung {standing.rung}"
            self._stop_at(job, count, where)
            log.info("job %d %s: %s", standing.number, where, self._describe(standing, goes_on=False))
        return False

    def _let_go_on(self, promoted: Sequence[Standing]) -> None:
        for standing in promoted:
            if self.rungs.must_run(standing.number):
                goal = self.rungs.goal(standing.number)
                self.queue.put_first(self.jobs[standing.number], goal)
                log.info(
                    "job %d goes on to report %d, rung %d: %s",
                    standing.number, goal, standing.rung + 1, self._describe(standing, goes_on=True),
                )  # fmt: skip

    def _describe(self, standing: Standing, goes_on: bool) -> str:
        """Return the value of a job at a rung and its place there, with why it goes on or does not."""
        goal = self.rungs.goal_of(standing.number, standing.rung)
        value = self._values(standing.number)[:goal][-1]
        place = f"{self.objective.metric} {value:.4g} is in place {standing.place} of {standing.ranked}"
        if goes_on and standing.place > standing.quota:
            return f"{place}, and no job has come to its end"
        return f"{place}, and the best {standing.quota} go on"
