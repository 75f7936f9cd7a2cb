"""Which job starts next, and when."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from ddp_hydra.errors import ClusterError
from ddp_hydra.sweep import scheduler as module
from ddp_hydra.sweep.planned_job import JobOutcome, Need, PlannedJob
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import JobRow, JobState
from ddp_hydra.sweep.scheduler import JobScheduler, RunningJob


class Cluster:
    """A cluster process without a process."""

    def __init__(self, config: str, workers: int = 4, is_up: bool = True) -> None:
        self.config, self.workers, self.is_gone, self.closed = config, workers, False, False
        self.scheduler = object() if is_up else None
        self.error: ClusterError | None = None

    def update(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True


def job(
    number: int = 0, ranks: int | None = 2, cluster: str = "a", workers: int = 0, is_ours: bool = True
) -> PlannedJob:
    config = OmegaConf.create({"hydra": {}})
    row = JobRow(number, [], str(number), workers=workers)
    return PlannedJob(row, config=config, need=Need(cluster, ranks), is_ours=is_ours)


@pytest.fixture
def make():
    """A scheduler, and the clusters that it has started."""

    def make(*jobs: PlannedJob, max_jobs: int | None = None) -> tuple[JobScheduler, list[Cluster]]:
        queue, started = JobQueue(Path(), None, OmegaConf.create({}), Need(), None, False), []
        queue.jobs.extend(jobs)

        def start(config: str) -> Cluster:
            started.append(Cluster(config))
            return started[-1]

        return JobScheduler(queue, max_jobs, start), started

    return make


def test_jobs_of_a_sweep_wait_for_as_many_workers_as_its_cluster_was_asked_for(tmp_path, monkeypatch):
    client = SimpleNamespace(scheduler=SimpleNamespace(address="tcp://s:8786"), security=None)
    monkeypatch.setattr(module.connect, "start", lambda *_: client)
    monkeypatch.setattr(module, "workers_of", lambda _: {})
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    sent = []
    pipe = SimpleNamespace(send=sent.append, poll=lambda _: True)
    module.serve("{_target_: a.Cluster, n_workers: 3}", "sweep-1", tmp_path, os.getppid(), pipe)
    (up,) = [value for kind, value in sent if kind == "up"]
    assert (up.expected, up.sweep) == (3, "sweep-1")


def start_all(scheduler: JobScheduler, workers: int = 2) -> list[int]:
    """Start what is ready; the numbers of the jobs. They have so many workers at once."""
    numbers = []
    for ready in scheduler.ready_jobs(lambda: False):
        ready.row.workers = workers
        scheduler.running.append(RunningJob(ready, None))
        numbers.append(ready.row.number)
    return numbers


@pytest.mark.parametrize(
    ("ranks", "running", "fits"),
    [
        (2, [], True),
        (2, [(2, 2), (2, 2)], True),  # it waits for workers
        (2, [(2, 2), (2, 2), (2, 0), (2, 0)], False),  # enough of them wait
        (None, [(None, 4), (None, 0)], False),
        (8, [], True),  # more ranks than workers: the job itself says so
    ],
)
def test_a_job_starts_where_there_are_workers_and_a_few_wait_for_them(make, ranks, running, fits):
    scheduler, _ = make()
    scheduler.bring_up("a")
    scheduler.running = [RunningJob(job(ranks=own, workers=workers), None) for own, workers in running]
    assert scheduler.fits(job(ranks=ranks)) is fits
    scheduler.running = [RunningJob(job(workers=2, is_ours=False), None) for _ in range(2)]
    assert not scheduler.fits(job(is_ours=False)), "tasks of other apps don't wait for workers of their own"


@pytest.mark.parametrize(("is_ours", "fits"), [(True, False), (False, True)])
def test_without_a_cluster_our_jobs_run_one_by_one_and_others_on_each_core(make, is_ours, fits, monkeypatch):
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    scheduler, _ = make()
    assert scheduler.fits(job(cluster="", is_ours=is_ours))
    scheduler.running = [RunningJob(job(cluster=""), None)]
    assert scheduler.fits(job(cluster="", is_ours=is_ours)) is fits


def test_no_more_than_max_jobs_start(make):
    scheduler, _ = make(*map(job, range(3)), max_jobs=1)
    assert start_all(scheduler) == [0]
    assert start_all(scheduler) == []
    scheduler.running.clear()
    assert start_all(scheduler) == [1]


def test_no_job_starts_before_the_cluster_is_up_or_once_the_sweep_stops(make):
    scheduler, started = make(job())
    scheduler.bring_up("a")
    started[0].scheduler = None
    assert start_all(scheduler) == []
    started[0].scheduler = object()
    assert list(scheduler.ready_jobs(lambda: True)) == []
    assert start_all(scheduler) == [0]


def test_jobs_for_another_cluster_start_when_the_others_have_ended(make):
    scheduler, started = make(job(0, cluster="a"), job(1, cluster="b"), job(2, cluster="a"))
    assert start_all(scheduler) == [0, 2]
    assert start_all(scheduler) == []
    assert [cluster.config for cluster in started] == ["a"]
    scheduler.running.clear()
    assert start_all(scheduler) == [1]
    assert [(cluster.config, cluster.closed) for cluster in started] == [("a", True), ("b", False)]


def test_a_cluster_that_is_gone_is_brought_up_again(make, caplog):
    scheduler, started = make(job())
    scheduler.bring_up("a")
    started[0].is_gone = True
    scheduler.running = [RunningJob(job(9, workers=2), None)]
    assert start_all(scheduler) == [0]
    assert [cluster.closed for cluster in started] == [True, False]
    assert "the cluster is gone: another one is brought up" in caplog.text


def test_jobs_on_a_cluster_that_cannot_be_brought_up_fail(make):
    first, other = job(0, cluster="a"), job(1, cluster="b")
    scheduler, started = make(first, other)
    scheduler.bring_up("a")
    started[0].error = ClusterError("no quota")
    assert start_all(scheduler) == []
    assert (first.row.state, first.row.message) == (JobState.failed, "no quota")
    assert started[0].closed
    assert start_all(scheduler) == [1]


class Process:
    """A process that has ended, or was sent signals."""

    def __init__(self, *messages: object) -> None:
        self.messages, self.signals = list(messages), []

    def end(self) -> None:
        pass

    def describe_end(self) -> str:
        return "killed by SIGSEGV"

    def signal(self, number: int) -> None:
        self.signals.append(number)


DONE, INTERRUPTED = JobOutcome(JobState.done, None), JobOutcome(JobState.interrupted, None, "saved")


@pytest.mark.parametrize(
    ("messages", "is_interrupted", "stop_reason", "state", "words"),
    [
        ([DONE], False, "", JobState.done, ""),
        ([DONE], False, "it took longer", JobState.done, ""),  # it came to its end all the same
        ([INTERRUPTED], False, "it took longer", JobState.failed, "it took longer"),
        ([], False, "", JobState.failed, "its own process ended (killed by SIGSEGV); see 0/logs/job.log"),
        ([], True, "", JobState.interrupted, "its own process ended (killed"),
    ],
)
def test_how_a_job_ended(messages, is_interrupted, stop_reason, state, words):
    planned = job()
    planned.folder = Path("0")
    outcome = RunningJob(planned, Process(*messages), stop_reason=stop_reason).outcome(is_interrupted)
    assert outcome.state == state
    assert words in outcome.message


def test_a_job_that_takes_too_long_is_interrupted_and_then_killed():
    running = RunningJob(job(), Process(), begun=100.0)
    running.check_time(None, 1e9)
    for now in (109.0, 111.0, 112.0, 122.0):
        running.check_time(10.0, now)
    assert running.process.signals == [signal.SIGINT, signal.SIGKILL]
    assert running.stop_reason == "it took longer than hydra.launcher.job_timeout_s=10"
