"""GPUs and cores of one host, among gangs that know nothing of each other; the GPUs are names only."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import pytest

from ddp_hydra.rank import device_leases, environment, fork_client

FOUR = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
CORES = range(8)


@pytest.fixture
def taken():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def take(taken):
    def of_gang(gang, local_rank, ranks, seen=FOUR, cores=CORES):
        return taken.enter_context(device_leases.acquire(gang, ranks, list(cores), seen, local_rank))

    return of_gang


def test_a_gang_that_is_alone_has_what_its_local_ranks_say_in_whatever_order_they_come(take):
    shares = {local_rank: take("one", local_rank, 4) for local_rank in (2, 0, 3, 1)}
    assert {local_rank: share.position for local_rank, share in shares.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert {share.other_ranks for share in shares.values()} == {0}


def test_gangs_take_free_gpus_first_and_share_them_evenly_where_none_is(take):
    assert [take("one", local_rank, 2).position for local_rank in range(2)] == [0, 1]
    assert [take("two", local_rank, 2).position for local_rank in (1, 0)] == [2, 3]
    third = take("three", 0, 1)
    assert (third.position, third.others_on_gpu) == (0, 1)


def test_ranks_of_a_gang_take_the_same_gpu_only_where_there_are_more_of_them_than_gpus(take):
    take("one", 1, 2)
    take("other", 0, 1)
    assert {take("one", 0, 2).position} == {2}
    assert sorted(take("three", local_rank, 3, FOUR[:2]).position for local_rank in range(3)) in ([0, 0, 1], [0, 1, 1])


def test_a_worker_that_sees_one_gpu_takes_no_other(take):
    assert take("one", 1, 2, ["GPU-b"]).position == 0
    assert take("two", 0, 1, ["GPU-b"]).others_on_gpu == 1
    assert take("three", 1, 1).position == 0  # GPU-b is taken, also by the name that another worker has for it
    assert take("four", 0, 1, []).position is None


def test_threads_are_shared_among_all_ranks_that_have_the_same_cores(take, monkeypatch):
    monkeypatch.setattr(environment, "cores", lambda: list(CORES))
    take("of two, one is not there yet", 0, 2)
    take("elsewhere", 0, 4, cores=range(8, 16))
    other_ranks = take("me", 0, 2).other_ranks
    assert other_ranks == 2
    assert environment.threads(8, 2 + other_ranks) == 2
    assert environment.threads(8, 100) == 1
    monkeypatch.setattr(environment, "cores", lambda: [0, 1])  # as dask-cuda binds it
    assert environment.threads(8, 2) == 2


def test_what_was_given_back_is_free_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with device_leases.acquire("one", 1, list(CORES), FOUR, 0):
        assert list(fork_client.runtime_folder().glob("*.lease"))
    with device_leases.acquire("two", 1, list(CORES), FOUR, 0) as share:
        assert share == device_leases.Share(0, 0, 0)
    assert not fork_client.runtime_folder().exists()


HOLDER = """
import os
from ddp_hydra.rank import device_leases
with device_leases.acquire("dead", 1, [0], ["GPU-a"], 0):
    print("taken", flush=True)
    os.read(0, 1)
"""


@pytest.mark.integration
def test_a_process_that_is_killed_holds_nothing(take):
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "taken\n"
        assert take("one", 0, 1).position == 1
        holder.kill()
    assert take("two", 0, 1).position == 0
