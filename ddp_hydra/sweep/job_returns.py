"""What Hydra's sweeper gets of a job: a `JobReturn`, from another process, from an earlier start, or of our own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Protocol

from hydra.core.utils import JobReturn, JobStatus

from ddp_hydra.console.text import message_of
from ddp_hydra.errors import DdpHydraError, SweepFailed
from ddp_hydra.sweep.rows import Row, State


class Job(Protocol):
    """What a result tells of its job: its row, its folder and its config."""

    @property
    def row(self) -> Row:
        """What the sweep's table has of it."""

    @property
    def folder(self) -> Path:
        """Its run directory."""

    @property
    def task_config(self) -> Any:
        """Its config without Hydra's own part."""


def failed(job: Job, error: Exception) -> JobReturn:
    """The result of a job that has none of its own; reading its value raises the error."""
    return _result(job, JobStatus.FAILED, error)


def of_before(job: Job) -> JobReturn:
    """What a job came to when the sweep was started before."""
    if job.row.state == State.done:
        return _result(job, JobStatus.COMPLETED, job.row.value)
    why = f"job {job.row.number} failed before ({job.row.message})"
    return failed(job, SweepFailed(f"{why}: run it again with hydra.launcher.retry_failed=true"))


def portable(result: JobReturn) -> JobReturn:
    """A result that survives the way to another process, at least in words."""
    try:
        pickle.loads(pickle.dumps(result))  # noqa: S301, our own words
    except Exception as reason:
        value = result._return_value
        if result.status == JobStatus.FAILED:
            result._return_value = RuntimeError(summarised(value))
        else:
            result.status = JobStatus.FAILED
            result._return_value = TypeError(
                f"the task returned a {type(value).__name__}, which cannot be sent to the sweep's process: {reason}"
            )
    return result


class RemoteTraceback(Exception):
    """Shows, as the cause of an error, where it was raised in the job's process."""

    def __str__(self) -> str:
        return f"in the job's process:\n{self.args[0]}"


def with_trace(result: JobReturn, trace: str) -> JobReturn:
    """Give an error the traceback that it had in the job's process. Hydra 1.4 does that itself."""
    error = result._return_value
    if isinstance(error, BaseException) and getattr(result, "_remote_traceback", None) is None:
        error.__cause__ = RemoteTraceback(trace)
    return result


def summarised(error: BaseException) -> str:
    """One line of an error."""
    if isinstance(error, DdpHydraError):
        return first_line(str(error))
    return first_line(": ".join(filter(None, [type(error).__name__, message_of(error)])))


def first_line(text: str) -> str:
    """Return the first line of a text, and the one that it announces: Hydra puts the cause into a line of its own."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    end = next((place for place, line in enumerate(lines) if not line.endswith(":")), len(lines))
    return " ".join(lines[: end + 1])


def _result(job: Job, status: JobStatus, value: Any) -> JobReturn:
    row = job.row
    result = JobReturn(overrides=row.overrides, cfg=job.task_config, working_dir=str(job.folder), status=status)
    result._return_value = value
    return result
