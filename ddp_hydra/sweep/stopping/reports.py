"""Reads the values of the objective that a job has reported: the lines of its metrics.jsonl that have the metric."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hydra.job.run_dir import saved_step
from ddp_hydra.sweep.job_status import number
from ddp_hydra.sweep.planned_job import PlannedJob
from ddp_hydra.sweep.rows import State


@dataclass(frozen=True)
class Report:
    """Holds one reported value.

    Args:
        value: of the objective; NaN if it was not finite.
        step: the step it was reported at; None if the app gives none.
        epoch: of the step.
        metrics: the last value of each metric up to here.
    """

    value: float
    step: int | None
    epoch: float | None
    metrics: dict[str, float | None]


class ReportFile:
    """Reads a metrics.jsonl while it grows.

    A job that starts again from a checkpoint removes the lines after it and writes them again, with the same values.
    They are not counted twice.

    Args:
        run_dir: the job's run directory.
        metric: the objective's metric.
        is_ours: the job's config is one of ours: then what it reports before its first step does not count.

    Attributes:
        reports: those read so far.
    """

    def __init__(self, run_dir: Path, metric: str, is_ours: bool = False) -> None:
        self.is_ours = is_ours
        self.path, self.metric = run_dir / "metrics.jsonl", metric
        self.reports: list[Report] = []
        self._metrics: dict[str, float | None] = {}
        self._known: tuple[int, int] = (0, 0)
        self._offset = 0

    def read(self, last_step: int | None = None) -> bool:
        """Read what is new; return whether there are new reports.

        Args:
            last_step: leave out later steps; None for all.
        """
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._known[0] or found.st_size < self._offset:
                    self._offset, self._metrics = 0, {}
                if (found.st_ino, found.st_size) == self._known:
                    return False
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return False
        self._known = found.st_ino, found.st_size
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        before = len(self.reports)
        for line in whole.splitlines():
            self._take(line, last_step)
        return len(self.reports) > before

    def _take(self, line: bytes, last_step: int | None) -> None:
        try:
            found: dict[str, Any] = json.loads(line)
            if "rank" in found:  # of another rank than 0
                return
            step, epoch = number(found.get("step"), int), number(found.get("epoch"))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return
        if self.is_ours and step == 0:  # trainer.validate_first
            return
        if last_step is not None and step is not None and step > last_step:
            return
        own = {"time", "attempt", "step", "epoch", "samples"}
        self._metrics |= {str(name): number(value) for name, value in found.items() if name not in own}
        last = self.reports[-1].step if self.reports else None
        is_known = step is not None and last is not None and step <= last
        if self.metric in found and not is_known:
            value = number(found[self.metric])
            self.reports.append(Report(math.nan if value is None else value, step, epoch, dict(self._metrics)))


def saved_reports(job: PlannedJob, sweep_dir: Path, metric: str) -> list[Report]:
    """Return what a job has reported in an earlier run of the sweep.

    What it has done after its last checkpoint does not count, because it will be done again, unless it has paused: then
    it had come to its end.

    Args:
        job: its row is the earlier one if it has ended there.
        sweep_dir: the folder of the sweep.
        metric: the objective's metric.
    """
    if job.earlier is None:
        return []
    run_dir = sweep_dir / job.earlier.folder
    file = ReportFile(run_dir, metric, job.is_ours)
    if job.row.state in (State.done, State.failed) or job.earlier.state == State.paused:
        file.read()
    else:
        step = job.row.step if job.row.state == State.stopped else saved_step(run_dir)
        file.read(-1 if step is None else step)
    return file.reports
