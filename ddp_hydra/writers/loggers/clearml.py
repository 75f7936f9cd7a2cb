"""Logs a job as a task of ClearML."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_hydra.record import Record
from ddp_hydra.writers.loggers.base import FAILED, FINISHED, PROJECT, Logger, Refusal, RunInfo, ServiceRun, picture


@dataclass(eq=False, repr=False)
class ClearmlLogger(Logger):
    """Logs to ClearML, or offline into ClearML's cache. The sweep of a job is a tag of its task, "sweep <name>".

    Args:
        project: None: CLEARML_PROJECT, else "ddp_hydra".
        run_name: None: CLEARML_TASK, else the name of the run directory.
        tags: further tags of the task.
        checkpoints: see `Logger`.
    """

    advice = "Type `clearml-init`, or set CLEARML_OFFLINE_MODE=1, or leave it out with results.loggers=[]"

    project: str | None = None
    run_name: str | None = None
    tags: Sequence[str] = ()
    task: Any = field(init=False, default=None)

    def begin(self, job: RunInfo) -> ServiceRun:
        """Open a task, or the earlier one. ClearML adds neither output nor hardware by itself."""
        from clearml import Task
        from clearml.backend_api.session.defs import MissingConfigError

        try:
            self.task = Task.init(
                project_name=self.project or os.environ.get("CLEARML_PROJECT") or PROJECT,
                task_name=self.run_name or os.environ.get("CLEARML_TASK") or job.name,
                tags=[*(self.tags or ()), *job.labels],
                reuse_last_task_id=False,
                continue_last_task=job.earlier if job.earlier and not Task.is_offline() else False,
                auto_connect_arg_parser=False,
                auto_connect_frameworks=False,
                auto_connect_streams=False,
                auto_resource_monitoring=False,
            )
        except (MissingConfigError, ValueError) as error:
            raise Refusal(str(error)) from error
        self.task.set_initial_iteration(0)  # our steps go on by themselves
        self.task.connect(dict(job.params), name="config")
        return ServiceRun(str(self.task.id), "" if Task.is_offline() else self.task.get_output_log_web_page() or "")

    def metrics(self, values: Mapping[str, float], record: Record) -> None:
        """Report the metrics of a step; ClearML would draw a value that is not finite as 0, so a text names it."""
        logger, step = self.task.get_logger(), record.step or 0
        for name, value in values.items():
            title, _, series = name.rpartition("/")
            if math.isfinite(value):
                logger.report_scalar(title or name, series, value, iteration=step)
            else:
                logger.report_text(f"step {step}: {name} is {value}", print_console=False)

    def text(self, name: str, text: str, step: int) -> None:
        self.task.get_logger().report_text(f"{name}, step {step}:\n{text}", print_console=False)

    def image(self, name: str, png: bytes, step: int) -> None:
        title, _, series = name.rpartition("/")
        self.task.get_logger().report_image(title or name, series, iteration=step, image=picture(png))

    def checkpoint(self, path: Path, step: int, is_best: bool) -> None:
        self.task.upload_artifact(f"{path.stem}{'-best' if is_best else ''}", artifact_object=str(path))

    def end(self, status: str) -> None:
        """Close the task; ClearML calls a killed one stopped."""
        if status == FAILED:
            self.task.mark_failed(force=True, status_message=status)
        elif status != FINISHED:
            self.task.mark_stopped(force=True, status_message=status)
        self.task.flush(wait_for_uploads=True)
        self.task.close()
