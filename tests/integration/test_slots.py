"""Several ranks on a worker: a Dask worker for each machine is how most clusters are set up."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import Client

from ddp_hydra import dispatch, results
from ddp_hydra.errors import RankFailed

pytestmark = pytest.mark.integration


def place() -> dict[str, str]:
    total = torch.ones(1)
    dist.all_reduce(total)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {**{name: os.environ[name] for name in names}, "sum": str(int(total))}


@pytest.mark.parametrize(("ranks", "world_size"), [(None, 4), (3, 3)])
def test_each_worker_holds_several_ranks(client2, ranks, world_size):
    places = dispatch.Gang(client2, ranks=ranks, ranks_per_worker=2).run(place)
    assert places == [
        {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
         "LOCAL_WORLD_SIZE": str(world_size), "sum": str(world_size)}
        for rank in range(world_size)
    ]  # fmt: skip


def test_the_number_of_gpus_decides_and_without_gpus_it_is_one(client2):
    assert len(dispatch.Gang(client2, ranks_per_worker="auto").run(place)) == 2


def fail(how: str) -> None:
    rank = dist.get_rank()
    print(f"rank {rank} says so")
    dist.barrier()  # all have said so before one fails and the others are ended
    if rank == 1:
        if how == "raises":
            raise ValueError("rank 1 has had enough")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.parametrize(("how", "message"), [("raises", "rank 1 has had enough"), ("dies", "killed by SIGKILL")])
def test_a_rank_that_fails_is_named_and_its_neighbours_on_the_worker_end(client2, how, message, tmp_path):
    with pytest.raises(RankFailed, match=f"rank 1 .*{message}"):
        dispatch.Gang(client2, ranks_per_worker=2, run_dir=tmp_path / "run").run(fail, how)
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "logs").iterdir()}
    assert sorted(logs) == [f"rank-{rank}.log" for rank in range(4)]
    assert [name for name, text in logs.items() if f"rank {name[5]} says so" not in text] == []


def once(folder: str) -> int:
    rank, mark = dist.get_rank(), os.path.join(folder, "failed")  # noqa: PTH118
    if rank == 3 and not os.path.exists(mark):  # noqa: PTH110
        open(mark, "w").close()  # noqa: PTH123
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return rank


def test_a_gang_starts_again_on_the_same_workers(client2, tmp_path):
    gang = dispatch.Gang(client2, ranks_per_worker=2, max_restarts=1)
    assert gang.run(once, str(tmp_path)) == [0, 1, 2, 3]
    assert len(gang.restarts.ended) == 1


def shout(lines: int) -> None:
    """Print without end on rank 1, and answer on the others."""
    dist.barrier()
    if dist.get_rank() == 1:
        for _ in range(lines):
            print("x" * 1000)
    else:
        for number in range(20):
            results.text("n", str(number))


def test_a_noisy_rank_does_not_hold_up_its_neighbours(client2):
    """The client is slow to read the noise; the records of the other ranks arrive before it is read."""
    order: list[tuple[int, str]] = []

    def read(record):
        order.append((record.rank, record.kind))
        if record.kind == "log" and record.rank == 1:
            time.sleep(0.05)

    dispatch.Gang(client2, ranks_per_worker=2, on_record=read).run(shout, 5_000)
    texts = [number for number, (rank, kind) in enumerate(order) if kind == "text"]
    noise = [number for number, (rank, kind) in enumerate(order) if (rank, kind) == (1, "log")]
    assert len(texts) == 60
    assert texts[-1] < noise[-1]


def test_a_worker_that_is_not_there_when_its_task_is_submitted_is_noticed(client2, monkeypatch):
    """The scheduler can't report it: it left between the reservation and the subscription."""
    from ddp_hydra.dispatch import placement

    plan = placement.plan

    def with_a_ghost(workers, slots, ranks):
        first, *_ = workers
        return plan({first: workers[first], "tcp://127.0.0.1:9": "127.0.0.1"}, slots, ranks)

    monkeypatch.setattr(placement, "plan", with_a_ghost)
    with pytest.raises(RankFailed, match=r"its worker tcp://127\.0\.0\.1:9 left the cluster"):
        dispatch.Gang(client2).run(place)


def keys(client: Client) -> list[str]:
    return sorted(
        client.run_on_scheduler(lambda dask_scheduler: [str(task.key) for task in dask_scheduler.tasks.values()])
    )


def test_tasks_live_on_when_a_gang_starts_again_and_leave_with_it(client2, tmp_path, wait_for):
    seen: list[list[str]] = []

    def read(record):
        if record.kind == "text":
            seen.append(keys(client2))
            (tmp_path / f"seen-{len(seen)}").touch()

    gang = dispatch.Gang(client2, ranks_per_worker=2, max_restarts=2, on_record=read)
    assert gang.run(dies_twice, str(tmp_path)) == [0, 1, 2, 3]
    assert len(gang.restarts.ended) == 2
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]  # no task was submitted again
    assert len(seen[0]) == 2
    assert dispatch.run(client2, dist.get_rank) == [0, 1]  # nothing holds the workers
    wait_for(lambda: keys(client2) == [], "no task left")


def test_the_first_records_of_tasks_that_live_on_are_not_lost_where_the_subscription_comes_late(client2, monkeypatch):
    """A rank whose rendezvous is lost would be waited for for ever."""
    subscribed, send = threading.Event(), client2._send_to_scheduler

    def late(message):
        if message["op"] == "subscribe-topic" and message["topic"].endswith("-1"):  # of the second attempt
            assert subscribed.wait(100)
        send(message)

    def read(record):
        if record.kind == "text":
            subscribed.set()

    subscribe = type(client2).subscribe_topic
    monkeypatch.setattr(client2, "subscribe_topic", lambda *given: threads.submit(subscribe, client2, *given))
    monkeypatch.setattr(client2, "_send_to_scheduler", late)
    with ThreadPoolExecutor(2) as threads:
        gang = dispatch.Gang(client2, max_restarts=1, on_record=read)
        assert gang.run(dies_in_the_first_attempt) == [0, 1]


def dies_in_the_first_attempt() -> int:
    rank = dist.get_rank()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        results.text("n", "")
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return rank


def dies_twice(folder: str) -> int:
    rank = dist.get_rank()
    marks = [Path(folder, str(number)) for number in range(2)]
    if rank == 0:
        results.text("n", "")
        attempt = 1 + sum(mark.exists() for mark in marks)
        while not Path(folder, f"seen-{attempt}").exists():
            time.sleep(0.01)
    dist.barrier()
    if rank == 1 and (left := [mark for mark in marks if not mark.exists()]):
        left[0].touch()
        if len(left) == 1:
            raise RuntimeError("another failure than the first one, which would not be tried again")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return rank
