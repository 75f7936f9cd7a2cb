"""One job of a sweep, in its own process: HydraConfig, logging, cwd and environment are a process's."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.types import HydraContext, TaskFunction

from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connect import Scheduler
from ddp_hydra.console.text import traceback_of
from ddp_hydra.sweep.job_returns import first_line, portable, summarised
from ddp_hydra.sweep.planned_job import PlannedJob
from ddp_hydra.sweep.rows import State


@dataclass
class Ended:
    """How a job ended.

    Args:
        state: done, failed or interrupted.
        result: what Hydra makes of it; None where it was interrupted.
        message: why it did not end well, in one line.
        trace: the traceback of what it raised, as text.
    """

    state: State
    result: JobReturn | None
    message: str = ""
    trace: str = ""


def coordinate(planned: PlannedJob, context: HydraContext, task: TaskFunction, scheduler: Scheduler | None) -> Ended:
    """Run one job as Hydra does.

    Args:
        planned: the job.
        context: Hydra's.
        task: the app's function.
        scheduler: of the sweep's cluster.
    """
    if scheduler is not None:
        connect.use_existing(scheduler)
    if scheduler is not None and not planned.is_ours:
        from ddp_hydra.sweep.other_apps import on_ranks

        assert planned.need.ranks is not None
        task = on_ranks(task, planned.need.ranks, context)
    try:
        result = run_job(
            hydra_context=context,
            task_function=task,
            config=planned.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
    except KeyboardInterrupt as error:
        return Ended(State.interrupted, None, first_line(str(error)) or "interrupted")
    except SystemExit as error:
        return Ended(State.failed, None, exited(error))
    except Exception as error:  # Hydra itself could not begin: hydra.job.env_set, its logging, the folder
        return Ended(State.failed, None, summarised(error), told(error))
    value, result = result._return_value, portable(result)
    if result.status == JobStatus.COMPLETED:
        return Ended(State.done, result)
    raised = value if isinstance(value, BaseException) else result._return_value
    return Ended(State.failed, result, summarised(raised), told(raised))


def exited(error: SystemExit) -> str:
    """Say how a task ended that called sys.exit."""
    if error.code in (None, 0):
        return "the task exited with code 0 (sys.exit) before it returned"
    if isinstance(error.code, int):
        return f"the task exited with code {error.code} (sys.exit)"
    return f"the task exited with code 1 (sys.exit): {first_line(str(error.code))}"


def told(error: BaseException) -> str:
    """Print a traceback into the job's log, and return it."""
    trace = traceback_of(error)
    print(trace, flush=True)  # noqa: T201
    return trace
