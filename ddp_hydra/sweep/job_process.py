"""Runs one job of a sweep in a process of its own, which has its own HydraConfig, logging, folder and environment.

The process is a fork of the sweep's. So the sweep imports what every job needs before it forks.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass

from hydra.core.utils import JobStatus, run_job
from hydra.types import HydraContext, TaskFunction

from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import Scheduler
from ddp_hydra.config import project
from ddp_hydra.console.text import traceback_of
from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.planned_job import CompactReturn, PlannedJob, describe_error, first_line, portable
from ddp_hydra.sweep.rows import JobState

PRELOAD = (
    "ddp_hydra.job.run",
    "ddp_hydra.dispatch.gang",
    "ddp_hydra.writers.files",
    "ddp_hydra.writers.hparams",
    "ddp_hydra.writers.text_files",
    "ddp_hydra.writers.progress",
    "tornado.platform.asyncio",
)
"""Modules that every job needs; imported once, before the processes of the jobs are forked."""


@dataclass
class JobOutcome:
    """The end of a job.

    Args:
        state: done, failed or interrupted.
        result: Hydra's result; None if there is none, because the job was interrupted or could not start.
        message: the reason why it did not end well, in one line.
        trace: the traceback of the error, as text.
    """

    state: JobState
    result: CompactReturn | None
    message: str = ""
    trace: str = ""


def preload(is_ours: bool) -> None:
    from distributed.versions import get_versions

    for name in PRELOAD if is_ours else ():
        importlib.import_module(name)
    get_versions()  # each job asks for these, which are remembered
    if is_ours:
        with contextlib.suppress(ConfigError, OSError):  # then each job says so
            project.pack(*project.layers())


def run_planned_job(
    planned: PlannedJob, context: HydraContext, task: TaskFunction, scheduler: Scheduler | None
) -> JobOutcome:
    if scheduler is not None:
        connect.use_existing(scheduler)
    if scheduler is not None and not planned.is_ours:
        from ddp_hydra.sweep.other_apps import on_ranks

        assert planned.need.workers is not None
        task = on_ranks(task, planned.need.workers, context)
    try:
        result = run_job(
            hydra_context=context,
            task_function=task,
            config=planned.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
    except KeyboardInterrupt as error:
        return JobOutcome(JobState.interrupted, None, first_line(str(error)) or "interrupted")
    except SystemExit as error:
        return JobOutcome(JobState.failed, None, describe_exit(error))
    except Exception as error:  # Hydra could not start the job: hydra.job.env_set, its logging, the folder
        return JobOutcome(JobState.failed, None, describe_error(error), print_traceback(error))
    value, sent = result._return_value, portable(result)
    if sent.status == JobStatus.COMPLETED:
        return JobOutcome(JobState.done, sent)
    raised = value if isinstance(value, BaseException) else sent._return_value
    return JobOutcome(JobState.failed, sent, describe_error(raised), print_traceback(raised))


def describe_exit(error: SystemExit) -> str:
    if error.code in (None, 0):
        return "the task exited with code 0 (sys.exit) before it returned"
    if isinstance(error.code, int):
        return f"the task exited with code {error.code} (sys.exit)"
    return f"the task exited with code 1 (sys.exit): {first_line(str(error.code))}"


def print_traceback(error: BaseException) -> str:
    trace = traceback_of(error)
    print(trace, flush=True)  # noqa: T201
    return trace
