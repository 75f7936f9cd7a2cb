"""Read what a sweep knows of its jobs, for those that keep no status of their own."""

from __future__ import annotations

from pathlib import Path

from ddp_hydra.job.remote.status import ENDED
from ddp_hydra.runs.describe import Row, number, numbers, text, texts
from ddp_hydra.runs.run_files import LocalRun, json_object
from ddp_hydra.writers.run_dir import is_held

NAME = "sweep.json"


class SweepJobs:
    """The jobs in the sweep.json of a folder, by their own folders' names; none if there is no such file.

    Args:
        folder: of the sweep.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        content = json_object(LocalRun(folder).read(NAME))
        jobs = content.get("jobs")
        found = [job for job in jobs if isinstance(job, dict)] if isinstance(jobs, list) else []
        self.jobs = {text(job.get("folder")): job for job in found}
        objective = content.get("objective")
        self.objective = objective if isinstance(objective, dict) else {}

    def fill(self, row: Row) -> None:
        """Take over the state and the results of a job into its row."""
        job = self.jobs.get(Path(row.run).name)
        if job is None:
            return
        if (state := text(job.get("state"))) in ("running", *ENDED):
            row.status = state
        if row.status == "running" and not self.is_held():
            row.status = "killed"
        row.objective = text(self.objective.get("metric"))
        maximize = self.objective.get("maximize")
        row.maximize = maximize if isinstance(maximize, bool) else None
        row.value, row.metrics = number(job.get("objective")), numbers(job.get("metrics"))
        row.wall_s = number(job.get("wall_s"))
        row.overrides = row.overrides or texts(job.get("overrides"))
        row.message = text(job.get("message"))

    def is_held(self) -> bool:
        """Return whether the process of the sweep lives, or may live: it locks the folder."""
        return is_held(Path(self.folder).resolve()) is not False
