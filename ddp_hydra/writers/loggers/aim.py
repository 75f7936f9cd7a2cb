"""Log a job as a run of Aim."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from ddp_hydra.results import Record
from ddp_hydra.writers.loggers.base import Logger, Refused, RunInfo, StartedRun

EXPERIMENT = "ddp_hydra"


class AimLogger(Logger):
    """Log to an Aim repository. The sweep of a job is the run's attribute `sweep`.

    Aim has no upload of files, so checkpoints stay in the run directory, which the attribute `run_dir` names.

    Args:
        repo: folder, or address of an Aim server, "aim://host:53800"; None: Aim's own choice, `.aim` in this folder.
        experiment: None: "ddp_hydra".
        run_name: None: the name of the run directory.
    """

    advice = "Start its server, or give results.aim.repo=<folder>, or leave it out with results.loggers=[]"

    def __init__(self, repo: str | None = None, experiment: str | None = None, run_name: str | None = None) -> None:
        super().__init__()
        self.repo, self.experiment, self.run_name = repo, experiment, run_name
        self.run: Any = None

    def begin(self, job: RunInfo) -> StartedRun:
        """Open a run, or the earlier one."""
        from aim import Run
        from aim.sdk.repo import Repo

        if self.repo is None or "://" not in self.repo:
            Repo.from_path(self.repo or ".", init=True).close()
        settings = {
            "repo": self.repo,
            "experiment": self.experiment or EXPERIMENT,
            "system_tracking_interval": None,
            "capture_terminal_logs": False,
        }
        try:
            self.run = Run(run_hash=job.earlier or None, **settings)
        except Exception as error:
            if not job.earlier or "MissingRunError" not in type(error).__name__:
                raise
            self.run = Run(**settings)
        self.run.name = self.run_name or job.name
        self.run["hparams"] = dict(job.params)
        self.run["run_dir"], self.run["sweep"], self.run["status"] = job.name, job.sweep, "running"
        for tag in job.tags:
            self.run.add_tag(tag)
        return StartedRun(self.run.hash)

    def metrics(self, values: Mapping[str, float], record: Record) -> None:
        """Track the metrics of a step; Aim stores NaN and infinity."""
        epoch = record.data.get("epoch")
        for name, value in values.items():
            self.run.track(value, name=name, step=record.step or 0, epoch=None if epoch is None else int(epoch))

    def text(self, name: str, text: str, step: int) -> None:
        """Track a text."""
        from aim import Text

        self.run.track(Text(text), name=name, step=step)

    def image(self, name: str, png: bytes, step: int) -> None:
        """Track an image."""
        from aim import Image
        from PIL import Image as Picture

        try:
            picture = Picture.open(io.BytesIO(png))
        except OSError as error:
            raise Refused(f"the image {name} cannot be read: {error}") from error
        self.run.track(Image(picture, format="png"), name=name, step=step)

    def end(self, status: str) -> None:
        """Close the run; Aim has no word for how it ended, so the attribute `status` says it."""
        self.run["status"] = status
        self.run.close()
