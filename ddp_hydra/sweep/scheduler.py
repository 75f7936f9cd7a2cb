"""Decides which job of a sweep starts next, and on which cluster; runs that cluster in a process of its own.

Such processes, and the processes of jobs, are forked, so that they have all that Hydra knows (the composed configs, the
resolvers, the task function, even a closure) and import nothing again. The process that forks runs no threads of its
own. They send messages to it, and end with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dask
from omegaconf import DictConfig, OmegaConf

from ddp_hydra import forked
from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import Scheduler, workers_of
from ddp_hydra.console.signals import SIGNALS, held_back
from ddp_hydra.errors import ClusterError, ConfigError, DdpHydraError, describe_exit
from ddp_hydra.rank.processes import die_with_parent, kill_group
from ddp_hydra.storage.files import try_lock
from ddp_hydra.sweep.planned_job import JobOutcome, PlannedJob
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import JobRow, JobState

log = logging.getLogger(__name__)
STOP_S = 10.0
"""How long a job that has exceeded its time limit may take to end."""


@dataclass
class RunningJob:
    """A job that has started. Times are of the monotonic clock.

    Args:
        begun: when it got its workers.
        stop_reason: why it alone was told to stop.
        kill_at: when it is killed.
    """

    planned: PlannedJob
    process: ForkedProcess
    begun: float = field(default_factory=time.monotonic)
    stop_reason: str = ""
    kill_at: float | None = None

    @property
    def row(self) -> JobRow:
        return self.planned.row

    @property
    def wall_s(self) -> float:
        return self.planned.spent_s + time.monotonic() - self.begun

    def outcome(self, is_interrupted: bool) -> JobOutcome:
        last = self.process.messages[-1] if self.process.messages else None
        self.process.end()
        if isinstance(last, JobOutcome):
            outcome = last
        else:
            log_file = self.planned.folder / "logs" / "job.log"
            message = f"its own process ended ({self.process.describe_end()}); see {log_file}"
            outcome = JobOutcome(JobState.interrupted if is_interrupted else JobState.failed, None, message)
        if self.stop_reason and outcome.state != JobState.done:
            return JobOutcome(JobState.failed, None, self.stop_reason)
        return outcome

    def check_time(self, limit_s: float | None, now: float) -> None:
        if limit_s is not None and now - self.begun > limit_s and not self.stop_reason:
            self.stop_reason = f"it took longer than hydra.launcher.job_timeout_s={limit_s:g}"
            self.kill_at = now + STOP_S
            self.process.signal(signal.SIGINT)
        if self.kill_at is not None and now > self.kill_at:
            self.process.signal(signal.SIGKILL)


class JobScheduler:
    """Fills the workers of a cluster with jobs.

    One cluster is up at a time, so that no cluster slows down the jobs on another. Jobs that need another one wait.

    Args:
        max_jobs: how many may run at once; None for as many as fit.

    Attributes:
        cluster: the one that is up, if any.
        running: the jobs that have started; the sweep adds and removes them.
    """

    def __init__(self, queue: JobQueue, max_jobs: int | None, start_cluster: Callable[[str], ClusterProcess]) -> None:
        self.queue, self.max_jobs, self.start_cluster = queue, max_jobs, start_cluster
        self.cluster: ClusterProcess | None = None
        self.running: list[RunningJob] = []

    def bring_up(self, config: str) -> None:
        if self.cluster is not None and (self.cluster.config != config or self.cluster.is_gone):
            self.close_cluster()
        if self.cluster is None and config:
            self.cluster = self.start_cluster(config)

    def close_cluster(self) -> None:
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            cluster.close()

    def ready_jobs(self, is_stopping: Callable[[], bool]) -> Iterator[PlannedJob]:
        """Yield the jobs to start now, taken from the queue. If a cluster cannot be brought up, all its jobs fail."""
        try:
            job = self._next_job()
            if not self.running and (job := job or self.queue.first(None)) is not None:
                self.bring_up(job.need.cluster)
            if self.cluster is not None:
                self.cluster.update()
                if self.cluster.is_gone and job is not None:
                    log.warning("the cluster is gone: another one is brought up")
                    self.bring_up(self.cluster.config)
            while job is not None and not is_stopping() and self.fits(job):
                self.queue.remove(job)
                yield job
                job = self._next_job()
        except ClusterError as error:
            config = self.cluster.config if self.cluster else ""
            self.close_cluster()
            self.queue.fail_all_on(config, error)

    def _next_job(self) -> PlannedJob | None:
        """Return the next job for the cluster that is up; for any cluster if none is up and nothing runs."""
        up = self.cluster.config if self.cluster is not None else "" if self.running else None
        return self.queue.first(up)

    def fits(self, job: PlannedJob) -> bool:
        """Return whether a job can start now.

        Once a job has its workers, jobs of ours start for as many workers again: they wait until one ends.
        """
        if self.max_jobs is not None and len(self.running) >= self.max_jobs:
            return False
        if self.cluster is None:
            most = os.cpu_count() or 1
            return len(self.running) < (most if not job.is_ours or job.is_dry else 1)
        if self.cluster.scheduler is None:
            return False
        total = self.cluster.workers
        used = sum(other.planned.need.workers or total for other in self.running)
        may_wait = job.is_ours and any(other.row.workers for other in self.running)
        return not self.running or used + (job.need.workers or total) <= (2 * total if may_wait else total)


COUNT_S = 1.0
"""How often the workers are counted."""
SHORT_LOGS = {
    "distributed.scheduler.events-cleanup-delay": "10s",  # the events of a client that has left; an hour otherwise
    "distributed.admin.low-level-log-length": 100,  # messages; of 1,000, each may start a rank and hold the project
}
"""What lets the memory of the scheduler grow with each job of a sweep."""
CLOSE_S = 30.0
"""How long the cluster may take to close."""


class ClusterProcess:
    """Starts a cluster in a process.

    Args:
        config: of the cluster, as YAML.
        sweep: the name of the sweep that workers are reserved for.
        output: the file that gets the cluster's output.

    Attributes:
        scheduler: None until the cluster is up.
    """

    def __init__(self, config: str, sweep: str, output: Path) -> None:
        self.config, self.output = config, output
        work = partial(serve, config, sweep, output.parent / "logs", os.getpid())
        self.process = ForkedProcess(work, output, watches_parent=True)
        self.scheduler: Scheduler | None = None
        self.workers = 0
        self.is_gone = False

    def update(self) -> None:
        is_alive = self.process.receive()
        for kind, value in self.process.messages:
            if kind == "up":
                self.scheduler = value
            elif kind == "workers":
                self.workers = value
            elif kind == "log":
                log.info(value)
            else:
                raise ClusterError(value)
        self.process.messages.clear()
        if not is_alive and not self.is_gone:
            self.is_gone = True
            if self.scheduler is None:
                raise ClusterError(
                    f"the process of the cluster ended ({self.process.describe_end()}): see {self.output}"
                )

    def close(self) -> None:
        self.process.end(CLOSE_S)


def serve(config: str, sweep: str, logs: Path, parent: int, pipe: Connection) -> tuple[str, Any]:
    """Bring up a cluster, and keep it until the sweep's process sends a message or ends. Runs in the forked process."""
    # Dask's workers would import the program's own file again, which may do more than define things.
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with ExitStack() as stack:
            parsed = OmegaConf.create(config)
            assert isinstance(parsed, DictConfig)
            # A LocalCluster's workers are forked from one process that has imported Dask, instead of spawned one by
            # one. That process has to be ours, because they inherit its environment.
            if connect.is_local(parsed):
                stack.enter_context(dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}))
            stack.enter_context(dask.config.set(SHORT_LOGS))
            client = connect.start(parsed, stack, lambda line: pipe.send(("log", line)), logs)
            workers = len(workers_of(client))
            pipe.send(("workers", workers))
            place = client.scheduler.address, client.security, sweep
            pipe.send(("up", Scheduler(*place, expected=parsed.get("n_workers"))))
            while os.getppid() == parent and not pipe.poll(COUNT_S):
                if workers != (workers := len(workers_of(client))):
                    pipe.send(("workers", workers))
    except KeyboardInterrupt:
        return "workers", 0
    except DdpHydraError as error:
        return "failed", str(error)
    return "workers", 0


KILL_S = 5.0
"""How long a process may take to end after a signal."""
LOCKS: set[int] = set()
"""File descriptors that hold locks of this process. A forked one closes them: else the locks would outlive this one."""


class ForkedProcess:
    """Starts a process.

    Its messages are unpickled, because it is a fork of this very process, and no other process has its pipe.

    Args:
        work: called there with its end of the pipe; what it returns is the last message.
        output: the file that its output is appended to; None leaves the output on the terminal.
        watches_parent: it ends by itself when this process is gone; otherwise it is killed then.
    """

    def __init__(
        self, work: Callable[[Connection], Any], output: Path | None = None, watches_parent: bool = False
    ) -> None:
        self.output, self.watches_parent = output, watches_parent
        self.pipe, theirs = multiprocessing.Pipe()
        self.messages: list[Any] = []
        self.unread = ""
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=self._main, args=(work, theirs, os.getpid()))
        with held_back(SIGNALS), warnings.catch_warnings():
            # Python 3.12 warns of any threads; the only ones that may be here are idle threads of libraries.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            self.process.start()
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(self.pid, self.pid)  # so that `end` can kill its group from now on
        theirs.close()

    def _main(self, work: Callable[[Connection], Any], pipe: Connection, parent: int) -> None:
        try:
            self._run(work, pipe, parent)
        except KeyboardInterrupt:
            sys.exit(130)  # without a traceback: it was asked to end
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # Python tidies up from here on, and must not be interrupted
            forked.end()

    def _run(self, work: Callable[[Connection], Any], pipe: Connection, parent: int) -> None:
        # A garbage collection would touch, and so copy, all memory that is shared with the parent. The parent freezes
        # only what it has imported: what it made since would never be collected there.
        forked.begin()
        gc.enable()
        os.setpgid(0, 0)  # Ctrl-C is handled by the parent
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if not self.watches_parent:
            die_with_parent(parent)
        self.pipe.close()
        while LOCKS:
            os.close(LOCKS.pop())
        if self.output is not None:
            redirect(self.output)
        result = work(pipe)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the result must arrive
        # `send` uses torch's reducers: a tensor's memory would have to be fetched from this process, which ends.
        pipe.send_bytes(pickle.dumps(result))

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def receive(self) -> bool:
        """Receive all messages that are there; return False if the process has ended and no more can come."""
        try:
            while self.pipe.poll():
                message = self.pipe.recv_bytes()
                try:
                    self.messages.append(pickle.loads(message))  # noqa: S301
                except Exception as error:  # of a class that only that process can import
                    self.unread = f"what it sent can't be read here: {type(error).__name__}: {error}"
        except (EOFError, OSError):
            self.process.join()
            return False
        return True

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, timeout_s: float = KILL_S) -> None:
        """End it and all processes that it has started: first by SIGINT, after the timeout by SIGKILL."""
        if self.process.is_alive():
            self.signal(signal.SIGINT)
            self.process.join(timeout_s)
        kill_group(self.pid)
        self.process.join()
        self.pipe.close()

    def describe_end(self) -> str:
        """Return how it ended, for a process that has sent no result."""
        return self.unread or describe_exit(self.process.exitcode or 0)[1]


def wait_for_message(processes: Sequence[ForkedProcess], timeout_s: float) -> None:
    connection.wait([process.pipe for process in processes], timeout_s)


def redirect(output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()


@contextmanager
def sweep_locked(folder: Path) -> Iterator[None]:
    """Keep other processes from running a sweep in the same folder."""
    handle = os.open(folder, os.O_RDONLY)
    LOCKS.add(handle)
    try:
        if not try_lock(handle):
            raise ConfigError(f"another sweep runs in {folder}: wait for it, or give another hydra.sweep.dir")
        yield
    finally:
        LOCKS.remove(handle)
        os.close(handle)
