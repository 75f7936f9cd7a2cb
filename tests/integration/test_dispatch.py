"""dispatch.run as a library: what the users of dask-pytorch-ddp had, on real processes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import Client

from benchmarks import scale
from ddp_hydra import dispatch, results
from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.dispatch import placement
from ddp_hydra.errors import ClusterError, RankFailed
from ddp_hydra.rank import fork_client
from tests.support.ports import free_port
from tests.support.warm_server import PATIENCE_S, wait_for

pytestmark = pytest.mark.integration


def who_am_i() -> int:
    return dist.get_rank()


def call(a, b="default", *rest, c=0, **others):
    return dist.get_rank(), a, b, rest, c, others


@pytest.mark.parametrize(
    ("args", "kwargs", "seen"),
    [
        (("a", "b", 1, 2), {"c": 3, "d": 4}, ("a", "b", (1, 2), 3, {"d": 4})),
        (("a",), {"fn": 1, "client": 2, "self": 3}, ("a", "default", (), 0, {"fn": 1, "client": 2, "self": 3})),
    ],
)
def test_arguments_arrive_by_position_and_by_name(client2, args, kwargs, seen):
    assert dispatch.run(client2, call, *args, **kwargs) == [(0, *seen), (1, *seen)]


def test_ranks_that_have_nothing_to_do_leave_in_peace_each_time(client4):
    """A rank that is through before another has joined must not look like a crash to it; the last one ends first."""

    def rest():
        time.sleep(0.05 * (dist.get_world_size() - dist.get_rank()))
        return dist.get_rank()

    for _ in range(10):
        assert dispatch.run(client4, who_am_i) == [0, 1, 2, 3]
    assert dispatch.run(client4, rest) == [0, 1, 2, 3]


def test_every_rank_finds_the_environment_that_everyone_expects(client2):
    def environment():
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        return {name: os.environ[name] for name in names}

    first, second = dispatch.run(client2, environment)
    port = first["MASTER_PORT"]
    assert 0 < int(port) < 65536
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    assert first == {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port, **shared}
    assert second == {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": port, **shared}


def test_ranks_run_on_the_cores_of_their_worker_and_not_of_whoever_started_the_server(client2):
    def bind(cores, dask_worker):
        os.sched_setaffinity(os.getpid(), {cores[dask_worker.address]})

    def unbind(everywhere):
        os.sched_setaffinity(os.getpid(), everywhere)

    everywhere = os.sched_getaffinity(0)
    wanted = [min(everywhere), max(everywhere)]
    workers = placement.plan(dict.fromkeys(workers_of(client2), "here"))
    try:
        client2.run(bind, {spec.worker: core for spec, core in zip(workers, wanted, strict=True)})
        assert dispatch.run(client2, lambda: sorted(os.sched_getaffinity(0))) == [[core] for core in wanted]
    finally:
        client2.run(unbind, everywhere)


def sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


def test_results_that_nobody_takes_are_counted_and_nothing_waits_for_a_reader(client2, caplog):
    """As the users of dask-pytorch-ddp do: a checkpoint now and then, and nobody who reads."""

    def train():
        for step in range(10):
            results.log({"loss": 0.5}, step=step)
            results.submit(f"step-{step}.pt", bytes(100_000))
        return dist.get_rank()

    def spooled(dask_worker):
        return [path.name for path in (Path(dask_worker.local_directory) / "ddp_hydra").rglob("*")]

    assert dispatch.run(client2, train) == [0, 1]
    assert (
        "results.*: 20 metrics records, 20 files (1.9 MiB); have it written with run_dir=<folder>, or receive it with "
        in caplog.text
    )
    wait_for(lambda: list(client2.run(spooled).values()) == [[], []], "what the ranks had spooled is gone")


def test_collectives_work_also_with_fewer_ranks_than_there_are_workers(client4, gang):
    assert gang(client4, ranks=3).run(sum_of_ranks) == [6.0] * 3


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, value):
        return self.factor * value + dist.get_rank()


def test_closures_lambdas_partials_and_objects_can_be_run(client2):
    offset = 10

    def outer(value):
        def inner():
            return value + offset + dist.get_rank()

        return inner()

    assert dispatch.run(client2, outer, 5) == [15, 16]
    assert dispatch.run(client2, lambda: offset) == [10, 10]
    assert dispatch.run(client2, functools.partial(outer, value=7)) == [17, 18]
    assert dispatch.run(client2, Scaled(100), 2) == [200, 201]


def test_a_function_may_be_given_by_name(client2):
    assert dispatch.run(client2, "os.path:join", "a", "b") == ["a/b", "a/b"]


def test_ranks_are_processes_of_their_own_that_ps_shows_by_rank(client2):
    def title():
        return os.getpid(), " ".join(psutil.Process().cmdline())

    titles = dispatch.run(client2, title)
    workers = client2.run(os.getpid).values()
    again = dispatch.run(client2, title)  # which is not a value of before
    assert len({*workers, os.getpid(), *(pid for pid, _ in titles), *(pid for pid, _ in again)}) == 7
    assert [title.split()[:3] for _, title in titles] == [["ddp_hydra", "rank", "0/2"], ["ddp_hydra", "rank", "1/2"]]


def test_large_and_odd_values_come_back(client2):
    def value():
        rank = dist.get_rank()
        return {
            "tensor": torch.full((2_500_000,), float(rank)),
            ("a", 1): {1, 2, 2**70},
            "bf16": torch.tensor([1.5], dtype=torch.bfloat16),
            "nothing": None,
        }

    for rank, found in enumerate(dispatch.run(client2, value)):
        assert torch.equal(found["tensor"], torch.full((2_500_000,), float(rank)))
        assert found["a", 1] == {1, 2, 2**70}
        assert found["bf16"].dtype == torch.bfloat16
        assert found["nothing"] is None
    wait_for(lambda: spooled(client2) == [], "what the ranks had spooled is gone")


def test_a_value_that_is_not_plain_data_is_refused_with_what_to_return_instead(client2):
    with pytest.raises(RankFailed, match=r"rank [01].*object is neither plain data.*state_dict.*results\.submit"):
        dispatch.run(client2, object)


def test_the_rendezvous_keeps_to_a_port_range(client2, gang):
    port = free_port()
    ports = gang(client2, port_range=(port, port)).run(lambda: os.environ["MASTER_PORT"])
    assert ports == [str(port)] * 2


def test_ranks_are_forks_that_were_ready(client2, warm_server, wait_for):
    def spares() -> set[int]:
        found = set()
        for process in warm_server.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "spare fork" in " ".join(process.cmdline()):
                    found.add(process.pid)
        return found

    def all_spares() -> set[int]:
        status, found = fork_client.ask(fork_client.socket_path(), "status"), spares()
        return found if status and not status["lacks_spares"] and status["spares"] == len(found) else set()

    dispatch.run(client2, os.getpid)
    ready = wait_for(all_spares, "forks for the next ranks")
    assert set(dispatch.run(client2, os.getpid)) <= ready
    wait_for(lambda: len(spares() - ready) >= 2, "others in their place")


@pytest.mark.slow
def test_a_gang_may_be_of_many(warm_server):
    """Once Dask told of five workers only."""
    ranks = 16
    with scale.workers(ranks) as (client, _):
        places = dispatch.run(client, lambda: (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.getpid()))
    assert [place[:2] for place in places] == [(rank, ranks) for rank in range(ranks)]
    assert len({pid for _, _, pid in places}) == ranks


# -- several jobs on one cluster ---------------------------------------------------------------------------


def hold(folder: str, name: str) -> int:
    """Say that this rank runs, and go on until told."""
    Path(folder, f"{name}-{dist.get_rank()}").touch()
    while not Path(folder, f"{name}-go").exists():
        time.sleep(0.01)
    return dist.get_rank()


def ranks_by_worker(client: Client) -> list[list[str]]:
    def busy(dask_scheduler):
        return [[str(task.key) for task in worker.processing] for worker in dask_scheduler.workers.values()]

    return client.run_on_scheduler(busy)


def test_two_jobs_run_beside_each_other_on_workers_of_their_own_and_a_third_waits(client4, gang, tmp_path, wait_for):
    folder = str(tmp_path)
    with ThreadPoolExecutor(3) as pool, Client(client4.scheduler.address) as other:
        jobs = {}
        for name, client in (("a", client4), ("b", other), ("c", other)):
            jobs[name] = pool.submit(gang(client, ranks=2, name=name).run, hold, folder, name)
            if name != "c":
                wait_for(lambda name=name: len(list(tmp_path.glob(f"{name}-?"))) == 2, f"job {name} on two ranks")
        try:
            time.sleep(1)
            assert sorted(len(keys) for keys in ranks_by_worker(client4)) == [1, 1, 1, 1]
            assert list(tmp_path.glob("c-?")) == []
            (tmp_path / "a-go").touch()
            wait_for(lambda: len(list(tmp_path.glob("c-?"))) == 2, "job c on the workers of job a")
        finally:
            for name in "abc":
                (tmp_path / f"{name}-go").touch()
        assert [job.result() for job in jobs.values()] == [[0, 1]] * 3


def test_a_job_that_waited_too_long_says_who_holds_the_workers(client2, gang, tmp_path, wait_for):
    with ThreadPoolExecutor(1) as pool, Client(client2.scheduler.address) as other:
        holder = pool.submit(gang(other, ranks=1).run, hold, str(tmp_path), "a")
        wait_for((tmp_path / "a-0").exists, "a job on one worker")
        try:
            with pytest.raises(ClusterError, match=r"2 workers were wanted, 1 of 2 are free.*other jobs.*ranks=1"):
                gang(client2, ranks=2, queue_timeout_s=0.3).run(who_am_i)
        finally:
            (tmp_path / "a-go").touch()
        assert holder.result() == [0]


HOLDER = """
import sys, time
from distributed import Client
from ddp_hydra import dispatch, results

def hold():
    import os, time
    from ddp_hydra import results
    results.text("pid", str(os.getpid()))
    results.submit("left.bin", bytes(100_000))
    time.sleep(600)

if __name__ == "__main__":
    said = lambda record: record.kind == "text" and print(record.data.text, flush=True)
    with Client(sys.argv[1]) as client:
        dispatch.Gang(client, on_record=said).run(hold)
"""


def age(client: Client) -> None:
    """Have the scheduler believe that its other clients were last heard an hour ago, and watched since."""

    def turn_back(me, dask_scheduler):
        for name, state in dask_scheduler.clients.items():
            if name != me:
                state.last_seen -= 3600
                dask_scheduler._ddp_hydra_watched[name] = 0.0

    client.run_on_scheduler(turn_back, client.id)


@pytest.mark.parametrize("how", ["dies", pytest.param("is suspended", marks=pytest.mark.slow)])
def test_a_client_that_is_gone_leaves_its_workers_free_and_nothing_running(client2, tmp_path, wait_for, alive, how):
    before = client2.run(os.getpid)
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    with subprocess.Popen(
        [sys.executable, str(script), client2.scheduler.address], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            pids = [int(holder.stdout.readline()) for _ in range(2)]
            if how == "is suspended":
                holder.send_signal(signal.SIGSTOP)
                age(client2)
                assert dispatch.run(client2, who_am_i) == [0, 1]
                holder.send_signal(signal.SIGCONT)
                assert holder.wait(timeout=PATIENCE_S) == 1
        finally:
            holder.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids), "the ranks of a dead client are gone")
    assert dispatch.run(client2, who_am_i) == [0, 1]
    assert client2.run(os.getpid) == before
    wait_for(lambda: spooled(client2) == [], "what the ranks had spooled is gone")
    wait_for(lambda: left_on_scheduler(client2) == ([], [], []), "no task, topic or reservation is left")


# -- nothing is left ---------------------------------------------------------------------------------------


def spooled(client: Client) -> list[str]:
    def find(dask_worker):
        from pathlib import Path

        return [str(path) for path in (Path(dask_worker.local_directory) / "ddp_hydra").rglob("*") if path.is_file()]

    return sorted(path for paths in client.run(find).values() for path in paths)


def left_on_scheduler(client: Client) -> tuple[list[str], list[str], list[str]]:
    def look(dask_scheduler):
        topics = [name for name in dask_scheduler._broker._topics if name.startswith("gang-")]
        return [str(key) for key in dask_scheduler.tasks], topics, list(dask_scheduler._ddp_hydra_reservations)

    return client.run_on_scheduler(look)


def chatty(fail: bool) -> int:
    for _ in range(3):
        results.submit(f"file-{dist.get_rank()}.bin", bytes(100_000))
    print("x" * 3_000_000)  # more than the client acknowledges at a time
    if fail and dist.get_rank() == 1:
        os._exit(1)
    dist.barrier()
    return dist.get_rank()


@pytest.mark.slow
def test_many_jobs_leave_no_task_record_file_or_descriptor_behind(client2, gang, wait_for):
    def open_descriptors():
        process = psutil.Process()
        return process.num_fds() - len(process.net_connections("tcp"))  # Dask opens and closes those as it likes

    def descriptors():
        return sum(client2.run(open_descriptors).values())

    gang(client2).run(chatty, fail=False)
    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        assert gang(client2).run(chatty, fail=False) == [0, 1]
        with pytest.raises(RankFailed):
            gang(client2).run(chatty, fail=True)
    assert spooled(client2) == []
    wait_for(lambda: left_on_scheduler(client2) == ([], [], []), "no task, topic or reservation left")
    wait_for(lambda: descriptors() <= before, "no more open descriptors on the workers than before")
    wait_for(lambda: threading.active_count() <= threads, "no more threads than before")


def test_a_job_of_a_sweep_leaves_the_cores_of_the_other_workers_to_their_jobs(client2):
    cores = len(os.sched_getaffinity(0))
    assert dispatch.Gang(client2, ranks=1).run("torch:get_num_threads") == [cores]
    assert dispatch.Gang(client2, ranks=1, sweep="s").run("torch:get_num_threads") == [max(1, cores // 2)]
