"""One job of a sweep, in its own process: HydraConfig, logging, cwd and environment are a process's."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.types import HydraContext, TaskFunction

from ddp_hydra import cluster
from ddp_hydra.cluster import Scheduler
from ddp_hydra.errors import DdpHydraError
from ddp_hydra.sweep.plan import Planned
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


def coordinate(
    planned: Planned, context: HydraContext, task: TaskFunction, scheduler: Scheduler | None, pipe: Connection
) -> Ended:
    """Run one job as Hydra does.

    Args:
        planned: the job.
        context: Hydra's.
        task: the app's function.
        scheduler: of the sweep's cluster.
        pipe: not used: all is said at the end.
    """
    if scheduler is not None:
        cluster.lend(scheduler)
    if scheduler is not None and not planned.is_ours:
        from ddp_hydra.sweep.foreign import on_ranks

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
        if error.code in (None, 0):
            return Ended(State.failed, None, "the task ended the process (sys.exit) before it returned")
        return Ended(State.failed, None, f"the task ended the process: sys.exit({error.code!r})")
    value, result = result._return_value, portable(result)
    if result.status == JobStatus.COMPLETED:
        return Ended(State.done, result)
    raised = value if isinstance(value, BaseException) else result._return_value
    trace = "".join(traceback.format_exception(raised))
    print(trace, flush=True)  # noqa: T201, into the job's log
    return Ended(State.failed, result, summarised(raised), trace)


def summarised(error: BaseException) -> str:
    """One line of an error."""
    if isinstance(error, DdpHydraError):
        return first_line(str(error))
    return first_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def first_line(text: str) -> str:
    """The first line of a text."""
    return text.strip().partition("\n")[0]


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


def with_trace(ended: Ended) -> Any:
    """Give the error its traceback back. Hydra 1.4 does that itself."""
    result = ended.result
    assert result is not None
    error = result._return_value
    if isinstance(error, BaseException) and getattr(result, "_remote_traceback", None) is None:
        error.__cause__ = RemoteTraceback(ended.trace)
    return result
