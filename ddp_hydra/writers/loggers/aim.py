"""Logs a job as a run of Aim."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_hydra.record import Record
from ddp_hydra.writers.loggers.base import PROJECT, Logger, Refusal, RunInfo, ServiceRun, picture


@dataclass(eq=False, repr=False)
class AimLogger(Logger):
    """Logs to a repository of Aim, or to its server. The sweep of a job is a tag of its run, "sweep <name>".

    Aim keeps no files, so checkpoints are not uploaded.

    Args:
        repo: folder, or address of a server, "aim://host:53800"; None: the current folder.
        experiment: None: "ddp_hydra".
        run_name: None: the name of the run directory.
        tags: further tags of the run.
        checkpoints: only None is allowed.
    """

    advice = "Start `aim server`, or give a folder with results.aim.repo=..., or leave it out with results.loggers=[]"

    repo: str | None = None
    experiment: str | None = None
    run_name: str | None = None
    tags: Sequence[str] = ()
    run: Any = field(init=False, default=None)

    def begin(self, job: RunInfo) -> ServiceRun:
        """Open a run, or the earlier one. Aim adds neither output nor hardware by itself."""
        if self.checkpoints is not None:
            raise Refusal(f"results.aim.checkpoints={self.checkpoints}: Aim keeps no files: give null")
        os.environ.setdefault("AIM_UI_TELEMETRY_ENABLED", "0")  # it would tell its makers of each use
        import aim

        self.run = aim.Run(
            run_hash=job.earlier or None,
            repo=self.repo or ".",
            experiment=self.experiment or PROJECT,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        self.run.name = self.run_name or job.name
        for tag in dict.fromkeys([*(self.tags or ()), *job.labels]):
            if tag not in self.run.tags:
                self.run.add_tag(tag)
        self.run["hparams"] = dict(job.params)
        return ServiceRun(self.run.hash, note=f"look at it with: aim up --repo {self.repo or '.'}")

    def metrics(self, values: Mapping[str, float], record: Record) -> None:
        """Track the metrics of a step; "train/loss" is the metric "loss" of the subset "train"."""
        step, epoch = record.step or 0, values.get("epoch")
        for name, value in values.items():
            subset, _, metric = name.rpartition("/")
            self.run.track(
                value,
                name=metric,
                step=step,
                epoch=None if epoch is None else int(epoch),
                context={"subset": subset} if subset else None,
            )

    def text(self, name: str, text: str, step: int) -> None:
        from aim import Text

        self.run.track(Text(text), name=name, step=step)

    def image(self, name: str, png: bytes, step: int) -> None:
        from aim import Image

        self.run.track(Image(picture(png)), name=name, step=step)

    def end(self, status: str) -> None:
        """Close the run; how it ended is its parameter "status"."""
        self.run["status"] = status
        self.run.close()
