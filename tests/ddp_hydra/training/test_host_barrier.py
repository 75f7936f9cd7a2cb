"""The barrier of the ranks on one host, each rank in a thread here."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddp_hydra.errors import SYMPTOMS
from ddp_hydra.training.parallel.shared_memory import HostBarrier, opened


def connected(ranks: int, timeout_s: float) -> list[HostBarrier]:
    pipes = {(of, to): os.pipe() for of in range(ranks) for to in range(ranks) if of != to}
    return [
        HostBarrier(
            {to: ends[1] for (of, to), ends in pipes.items() if of == rank},
            {of: ends[0] for (of, to), ends in pipes.items() if to == rank},
            timeout_s,
        )
        for rank in range(ranks)
    ]


@pytest.fixture
def four() -> Iterator[list[HostBarrier]]:
    barriers = connected(4, 20.0)
    yield barriers
    for barrier in barriers:
        barrier.close()


def test_no_rank_goes_on_before_all_are_there(four):
    rounds = [0] * 4

    def go(rank: int) -> list[str]:
        pace, early = random.Random(rank), []
        for turn in range(1, 60):
            time.sleep(pace.choice((0, 0, 0, 0.002)))
            rounds[rank] = turn
            four[rank].wait()
            early += [f"{rank} in turn {turn}: {rounds}"] * (min(rounds) < turn)
        return early

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(go, range(4))) == [[]] * 4


def test_a_rank_that_goes_while_others_wait_is_named(four):
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(barrier.wait) for barrier in four[:3]]
        time.sleep(0.05)
        assert not any(future.done() for future in waiting)
        four[3].close()
        assert {str(future.exception(10)) for future in waiting} == {"connection closed by rank 3"}
    assert SYMPTOMS.search("connection closed by rank 3")


def test_a_rank_may_go_as_soon_as_it_has_met_the_others(four):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda barrier: (barrier.wait(), barrier.close()), four))


def test_it_does_not_wait_for_ever():
    one, other = connected(2, 0.05)
    try:
        with pytest.raises(RuntimeError, match=r"timed out waiting for rank 1, after 0\.05 s") as caught:
            one.wait()
        assert SYMPTOMS.search(str(caught.value))
    finally:
        one.close()
        other.close()
    one.close()  # a second time


def test_only_the_pipe_that_was_meant_is_opened(tmp_path):
    end, to = os.pipe()
    inode = os.fstat(to).st_ino
    file = (tmp_path / "file").open("wb")
    try:
        assert opened(os.getpid(), to, inode + 1) is None
        assert opened(os.getpid(), file.fileno(), inode) is None
        assert opened(os.getpid(), 1000, inode) is None
        other = opened(os.getpid(), to, inode)
        assert other is not None
        os.write(other, b"x")
        assert os.read(end, 2) == b"x"
        os.close(other)
    finally:
        file.close()
        os.close(end)
        os.close(to)
