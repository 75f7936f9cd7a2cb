"""Memory in which ranks of one host average their gradients: where buckets lie, and who finds it."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ddp_hydra.errors import SYMPTOMS
from ddp_hydra.rank.world import World
from ddp_hydra.training.parallel import shared_memory
from ddp_hydra.training.parallel.shared_memory import HostBarrier, SharedGradients, mapped, mean, new_memory, opened


@pytest.fixture
def shared() -> SharedGradients:
    return SharedGradients(World(0, 3), torch.zeros(2, 3, 1024, dtype=torch.uint8), HostBarrier({}, {}, 1.0))


def lies(shared: SharedGradients, place: torch.Tensor) -> tuple[int, int, int]:
    offset = place.data_ptr() - shared.arena.data_ptr()
    start = offset % (3 * 1024)
    return offset // (3 * 1024), start, start + place[0].numel() * place.element_size()


@pytest.mark.parametrize(
    "steps",
    [
        [[100]] * 4,
        [[100, 50]] * 4,
        [[50, 50, 50], [150], [150]],  # DDP lays them out anew after a step
        [[150], [50, 50, 50], [20, 130]],
        [[1], [1], [1, 1], [1, 1, 1]],
    ],
    ids=str,
)
def test_no_bucket_lies_where_the_one_before_is_still_read(shared, steps):
    before = None
    for sizes in steps:
        for index, size in enumerate(sizes):
            place = shared.place(index, torch.zeros(size))
            assert place.shape == (3, size)
            half, start, stop = lies(shared, place)
            assert start % shared_memory.ALIGN == 0
            assert before is None or before[0] != half or stop <= before[1] or before[2] <= start
            before = half, start, stop


def test_one_half_does_for_several_buckets(shared):
    """The other one is never touched, so no memory is spent on it."""
    for _ in range(3):
        for index in range(2):
            assert lies(shared, shared.place(index, torch.zeros(60)))[0] == 0


def test_buckets_of_several_types_lie_beside_each_other(shared):
    places = [
        shared.place(index, torch.zeros(size, dtype=dtype))
        for index, (size, dtype) in enumerate([(3, torch.bfloat16), (5, torch.float64), (7, torch.float32)])
    ]
    for value, place in enumerate(places):
        place.fill_(value + 0.5)
    assert [place.dtype for place in places] == [torch.bfloat16, torch.float64, torch.float32]
    assert [place.unique().tolist() for place in places] == [[0.5], [1.5], [2.5]]


def test_the_mean_is_summed_in_order_of_rank():
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 3.0)]
    assert mean(parts, out=torch.empty(1)).item() == 0.75  # 1e8 + 1 is 1e8
    assert mean(parts, out=parts[0]).item() == 0.75


def test_memory_is_found_by_its_name_alone_and_for_a_while(tmp_path):
    other = tmp_path / "file"
    other.write_bytes(bytes(64))
    with new_memory("right", 64) as path:
        assert mapped("wrong", path, 64) is None
        assert mapped("right", str(other), 64) is None
        assert mapped("right", "", 64) is None
        memory = mapped("right", path, 64)
        assert memory is not None
        memory[:5] = b"hello"
        assert Path(path).read_bytes()[:5] == b"hello"
    assert mapped("right", path, 64) is None
    assert memory[:5] == b"hello"
    memory.close()


def test_a_limit_on_the_size_of_files_leaves_none(monkeypatch):
    made = []

    def refuse(fd: int, n_bytes: int) -> None:
        made.append(fd)
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with new_memory("name", 64) as path:
        assert path == ""
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def test_a_system_without_such_memory_has_none(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with new_memory("name", 64) as path:
        assert path == ""


def test_the_factor_of_a_step_is_that_of_the_numbers_of_all_ranks_and_of_this_step_alone(shared, monkeypatch):
    monkeypatch.setattr(HostBarrier, "wait", lambda self: None)
    place = shared.place(0, torch.zeros(4))

    def average(first: bool = True) -> list[float]:
        place[:] = torch.tensor([[3.0], [6.0], [0.0]]).expand(3, 4)
        return shared.average(place, torch.full((4,), 3.0), first).tolist()

    def three(rows: torch.Tensor) -> float:
        assert rows.shape == (3, 2)
        assert rows[0].tolist() == [1, 2]
        return 3.0

    shared.send_along(torch.tensor([1, 2]), three)
    assert (average(), shared.is_weighed) == ([9.0] * 4, True)
    assert average(first=False) == [9.0] * 4  # the next bucket of the same step
    assert (average(), shared.is_weighed) == ([3.0] * 4, False)  # nothing was sent along

    def refuse(rows: torch.Tensor) -> float:
        raise ValueError("negative")

    shared.send_along(torch.tensor([1, 2]), refuse)
    assert (average(), shared.is_weighed) == ([3.0] * 4, False)


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
    barriers = connected(4, 100.0)
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
        assert {str(future.exception(100)) for future in waiting} == {"connection closed by rank 3"}
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
