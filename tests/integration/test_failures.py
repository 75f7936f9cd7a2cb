"""A rank, a worker or the client goes wrong: the cause is named, the rest is stopped, the cluster stays usable."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import Client

from ddp_hydra import dispatch, results
from ddp_hydra.cluster import preflight
from ddp_hydra.dispatch import workers
from ddp_hydra.errors import ClusterError, RankFailed
from tests.support.warm_server import wait_for as wait_until

pytestmark = pytest.mark.integration


def rank() -> int:
    return dist.get_rank()


# -- how a rank can fail -----------------------------------------------------------------------------------


def raise_value_error():
    raise ValueError("boom 42")


def leave_at_once():
    os._exit(3)


def leave_with_a_word():
    sys.exit("no more disks")


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def segfault():
    ctypes.string_at(0)


FAILURES = [
    pytest.param(raise_value_error, "raised", "ValueError: boom 42", "in raise_value_error", id="raises"),
    pytest.param(leave_at_once, "exited", "code 3", "", id="os-exit"),
    pytest.param(leave_with_a_word, "exited", r"code 1 .*no more disks", "", id="sys-exit"),
    pytest.param(be_killed, "killed", "SIGKILL", "", id="sigkill"),
    pytest.param(segfault, "killed", "SIGSEGV", "in segfault", id="segfault"),
]

# -- what the others do meanwhile --------------------------------------------------------------------------


def in_a_collective():
    dist.all_reduce(torch.ones(1))


def asleep():
    time.sleep(600)


def deaf_to_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(600)


def the_last_one_fails(fail, others):
    results.text("pid", str(os.getpid()))
    dist.barrier()
    if rank() == dist.get_world_size() - 1:
        fail()
    others()


def assert_clean_stop(client, heard, alive, ranks=2):
    """No rank is left, no worker was lost, and the next job runs."""
    assert len(heard.pids()) == ranks
    assert not [pid for pid in heard.pids() if alive(pid)]
    assert dispatch.run(client, rank) == list(range(len(client.run(os.getpid))))


@pytest.mark.parametrize(("fail", "kind", "message", "trace"), FAILURES)
def test_a_failing_rank_is_the_root_cause_while_others_sit_in_a_collective(
    client2, gang, heard, alive, fail, kind, message, trace
):
    workers = client2.run(os.getpid)
    with pytest.raises(RankFailed, match=rf"rank 1 on 127\.0\.0\.1: .*{message}") as caught:
        gang(client2).run(the_last_one_fails, fail, in_a_collective)
    failure = caught.value.failure
    assert (failure.rank, failure.kind, failure.host) == (1, kind, "127.0.0.1")
    assert trace in failure.traceback
    # Its echo: rank 0 raises "connection closed" as soon as rank 1 is dead.
    assert [(symptom.rank, symptom.is_symptom) for symptom in caught.value.symptoms] in ([], [(0, True)])
    assert_clean_stop(client2, heard, alive)
    assert client2.run(os.getpid) == workers


@pytest.mark.parametrize("others", [asleep, deaf_to_sigterm])
def test_ranks_that_do_not_talk_to_the_failed_one_are_stopped_all_the_same(client4, gang, heard, alive, others):
    with pytest.raises(RankFailed, match=r"rank 3 .*ValueError: boom 42") as caught:
        gang(client4).run(the_last_one_fails, raise_value_error, others)
    assert caught.value.symptoms == ()
    assert_clean_stop(client4, heard, alive, ranks=4)


def leave_a_child(own_session):
    """Start a process that keeps this rank's output open."""
    import subprocess

    child = subprocess.Popen(["sleep", "60"], start_new_session=own_session)
    results.text("child", str(child.pid))


def assert_children_end(heard, alive, wait_for):
    children = [int(pid) for pid in heard.texts("child").values()]
    assert len(children) == 2
    wait_for(lambda: not any(alive(child) for child in children), "the ranks' children are gone")


@pytest.mark.parametrize("own_session", [False, True])
def test_what_a_rank_has_started_itself_goes_with_it(client2, gang, heard, alive, wait_for, own_session):
    def with_a_child():
        leave_a_child(own_session)
        the_last_one_fails(raise_value_error, in_a_collective)

    with pytest.raises(RankFailed, match=r"rank 1 on 127\.0\.0\.1: ValueError: boom 42"):
        gang(client2).run(with_a_child)
    assert_children_end(heard, alive, wait_for)


def test_a_process_left_behind_does_not_hold_the_job_and_is_named_in_the_log(client2, gang, heard, alive, wait_for):
    def stubborn_daemon():
        """The rank's child ends, and its grandchild is deaf to SIGTERM and writes on."""
        leave_a_child(own_session=True)
        subprocess.run(["sh", "-c", "trap '' TERM; setsid sh -c 'while sleep 0.01; do echo y; done' &"], check=True)
        print("without a newline", end="")
        return rank()

    assert gang(client2).run(stubborn_daemon) == [0, 1]
    assert_children_end(heard, alive, wait_for)
    said = heard.output(0) + heard.output(1)  # of ranks that end at the same moment, one may name what both have left
    assert re.search(r"\nrank \d of 2: it has left processes behind, and they were ended: ", said)
    assert said.count("sleep 60 (process ") == 2
    assert said.count("while sleep 0.01") == 2


def test_all_ranks_failing_at_once_is_one_error_with_the_others_as_symptoms(client4):
    def all_fail():
        dist.barrier()
        raise ValueError(f"boom {rank()}")

    with pytest.raises(RankFailed, match=r"rank \d on .*boom \d") as caught:
        dispatch.run(client4, all_fail)
    failures = [caught.value.failure, *caught.value.symptoms]
    assert {failure.message for failure in failures} <= {f"ValueError: boom {n}" for n in range(4)}


def test_a_function_that_does_not_exist_is_named(client2):
    with pytest.raises(RankFailed, match="ModuleNotFoundError: No module named 'no_such_module'"):
        dispatch.run(client2, "no_such_module:function")
    with pytest.raises(RankFailed, match=r"AttributeError: .*no_such_function"):
        dispatch.run(client2, "os:no_such_function")


@pytest.mark.slow
def test_a_collective_that_waits_too_long_is_an_error(client2, gang, heard, alive):
    def rank_1_never_comes():
        results.text("pid", str(os.getpid()))
        if rank() == 0:
            dist.all_reduce(torch.ones(1))
        time.sleep(600)

    with pytest.raises(RankFailed, match=r"(?i)rank 0 on .*time"):
        gang(client2, timeout_s=20).run(rank_1_never_comes)
    assert_clean_stop(client2, heard, alive)


# -- workers and clients -----------------------------------------------------------------------------------


def everyone_told_its_pid(heard, ranks: int) -> bool:
    return len(heard.pids()) == ranks


def tell_pid_and_wait():
    results.text("pid", str(os.getpid()))
    dist.barrier()
    in_a_collective() if rank() == 0 else asleep()


def tell_pid_and_sleep():
    results.text("pid", str(os.getpid()))
    asleep()


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_worker_is_the_root_cause_and_takes_its_rank_along(fresh_client, gang, heard, alive, wait_for, lost):
    workers = fresh_client.run(os.getpid)

    def kill_when_all_run(record):
        heard(record)
        if everyone_told_its_pid(heard, 2) and not killed:
            killed.append(lost)
            os.kill(workers[job.attempt.specs[lost].worker], signal.SIGKILL)

    killed = []
    job = gang(fresh_client, on_record=kill_when_all_run)
    with pytest.raises(RankFailed, match=rf"rank {lost} on .*its worker tcp://.* left the cluster") as caught:
        job.run(tell_pid_and_wait)
    wait_for(lambda: not any(alive(pid) for pid in heard.pids()), "the end of the lost worker's rank")
    assert (caught.value.failure.rank, caught.value.failure.kind) == (lost, "lost")
    fresh_client.wait_for_workers(2, timeout=100)
    assert dispatch.run(fresh_client, rank) == [0, 1]


@pytest.mark.slow
def test_each_of_two_gangs_of_one_client_notices_the_loss_of_its_worker(fresh_client, gang, new_heard, wait_for):
    """The later gang listens to the same client; the earlier one must not go deaf."""
    workers = fresh_client.run(os.getpid)
    heards = [new_heard(), new_heard()]
    jobs = [gang(fresh_client, ranks=1, on_record=heard) for heard in heards]
    with ThreadPoolExecutor(2) as pool:
        runs = []
        for job, heard in zip(jobs, heards, strict=True):
            runs.append(pool.submit(job.run, tell_pid_and_sleep))
            wait_for(heard.pids, "the rank of the job runs")
        os.kill(workers[jobs[0].attempt.specs[0].worker], signal.SIGKILL)
        try:
            with pytest.raises(RankFailed, match=r"rank 0 on .*its worker tcp://.* left the cluster"):
                runs[0].result()
            assert not runs[1].done()
        finally:
            for pid in [*heards[0].pids(), *heards[1].pids()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"rank 0 on .*SIGKILL"):
            runs[1].result()


class DiskFull(Exception):
    pass


def test_an_error_of_the_reader_stops_the_ranks_and_comes_out(client2, gang, heard, alive):
    def refuse(record):
        heard(record)
        if everyone_told_its_pid(heard, 2):
            raise DiskFull

    with pytest.raises(DiskFull):
        gang(client2, on_record=refuse).run(tell_pid_and_wait)
    assert not [pid for pid in heard.pids() if alive(pid)]
    assert dispatch.run(client2, rank) == [0, 1]


def test_an_interrupt_of_the_client_stops_the_ranks_and_comes_out(client2, gang, heard, alive):
    def interrupt(record):
        heard(record)
        if everyone_told_its_pid(heard, 2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        gang(client2, on_record=interrupt).run(tell_pid_and_wait)
    assert not [pid for pid in heard.pids() if alive(pid)]
    assert dispatch.run(client2, rank) == [0, 1]


def test_a_lost_scheduler_ends_the_job_with_a_sentence(tmp_path):
    def command(what: str, *arguments: str) -> subprocess.Popen:
        module = f"distributed.cli.dask_{what}"
        line = [sys.executable, "-m", module, "--scheduler-file", str(tmp_path / "scheduler.json"), "--no-dashboard"]
        return subprocess.Popen([*line, *arguments], stderr=subprocess.DEVNULL, cwd=tmp_path)

    scheduler = command("scheduler", "--host", "127.0.0.1", "--port", "0")
    worker = command("worker", "--nthreads", "1", "--no-nanny", "--local-directory", str(tmp_path / "worker"))
    try:
        file = tmp_path / "scheduler.json"
        wait_until(lambda: file.exists() and file.read_text().endswith("}"), "the scheduler is up")
        with Client(scheduler_file=str(file), timeout="100s", set_as_default=False) as client:
            client.wait_for_workers(1, timeout=100)

            def kill_once_up(record):
                scheduler.kill()

            with pytest.raises(ClusterError, match=r"the scheduler tcp://.* is lost"):
                dispatch.Gang(client, on_record=kill_once_up).run(tell_pid_and_sleep)
    finally:
        for process in (worker, scheduler):
            process.kill()
            process.wait()


def fail_at_first(mark: str) -> int:
    if dist.get_rank() == 1 and not Path(mark).exists():
        Path(mark).touch()
        os._exit(3)
    return dist.get_rank()


def test_tasks_of_workers_that_answer_late_run_the_next_attempt(client2, gang, tmp_path, monkeypatch):
    """Submitted again, the attempt would be run by two tasks of each worker."""
    mark, check = tmp_path / "mark", preflight.check_workers

    def check_and_delay(client, *more):
        check(client, *more)
        if mark.exists():
            client.run(lambda dask_worker: bool(dask_worker.loop.call_later(0.05, time.sleep, 1.5)))
            time.sleep(0.2)

    monkeypatch.setattr(preflight, "check_workers", check_and_delay)
    monkeypatch.setattr(workers, "CALL_S", 0.5)
    again = gang(client2, max_restarts=1)
    assert again.run(fail_at_first, str(mark)) == [0, 1]
    assert again.restarts.used == 1
