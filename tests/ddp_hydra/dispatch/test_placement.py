from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.cluster.scheduler_plugin import choose, natural
from ddp_hydra.dispatch.placement import by_gpus, by_worker, plan


def workers(**ports: list[int]) -> dict[str, str]:
    return {f"tcp://{host}:{port}": host for host, numbers in ports.items() for port in numbers}


@pytest.mark.parametrize(
    ("given", "in_order"),
    [
        (["a:10000", "a:8786"], ["a:8786", "a:10000"]),
        (["10.0.0.10:1", "10.0.0.9:2", "10.0.0.9:1"], ["10.0.0.9:1", "10.0.0.9:2", "10.0.0.10:1"]),
        (["node-b:1", "10.0.0.1:1", "node-a:1"], ["10.0.0.1:1", "node-a:1", "node-b:1"]),
        (["", "1", "a", "a1"], ["", "1", "a", "a1"]),
    ],
)
def test_numbers_in_addresses_count_as_numbers(given, in_order):
    assert sorted(given, key=natural) == in_order


def test_ranks_are_numbered_host_by_host_whatever_the_order_of_arrival():
    mixed = workers(b=[9000], a=[10000], c=[1]) | workers(a=[8786], c=[2])
    specs = plan(mixed)
    assert [(s.rank, s.host, s.worker, s.local_rank, s.local_world_size, s.node_rank) for s in specs] == [
        (0, "a", "tcp://a:8786", 0, 2, 0),
        (1, "a", "tcp://a:10000", 1, 2, 0),
        (2, "b", "tcp://b:9000", 0, 1, 1),
        (3, "c", "tcp://c:1", 0, 2, 2),
        (4, "c", "tcp://c:2", 1, 2, 2),
    ]
    assert {s.world_size for s in specs} == {5}
    assert plan(dict(reversed(mixed.items()))) == specs


@pytest.mark.parametrize(
    ("free", "n", "chosen"),
    [
        (workers(a=[1, 2], b=[1, 2, 3, 4]), 2, ["tcp://a:1", "tcp://a:2"]),  # the tightest host that has room
        (workers(a=[1, 2], b=[1, 2, 3, 4]), 3, ["tcp://b:1", "tcp://b:2", "tcp://b:3"]),
        (workers(a=[1], b=[1, 2], c=[1, 2, 3]), 4, ["tcp://c:1", "tcp://c:2", "tcp://c:3", "tcp://a:1"]),
        (workers(a=[10000, 8786]), 1, ["tcp://a:8786"]),
        (workers(a=[1]), 0, []),
        ({}, 0, []),
    ],
)
def test_workers_are_taken_from_as_few_hosts_as_can_be(free, n, chosen):
    assert list(choose(free, n)) == chosen


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_no_choice_needs_fewer_hosts(sizes, data):
    n = data.draw(st.integers(1, sum(sizes)))
    free = workers(**{f"host{i}": list(range(size)) for i, size in enumerate(sizes)})
    chosen = choose(free, n)
    fewest = next(k for k in range(1, len(sizes) + 1) if sum(sorted(sizes)[-k:]) >= n)
    assert chosen.items() <= free.items()
    assert len(chosen) == n
    assert len(set(chosen.values())) == fewest


def test_a_worker_holds_several_ranks_and_the_last_one_what_is_left():
    specs = plan(workers(a=[1, 2], b=[1]), slots=2, ranks=5)
    assert [(s.rank, s.worker, s.local_rank, s.local_world_size, s.node_rank) for s in specs] == [
        (0, "tcp://a:1", 0, 4, 0),
        (1, "tcp://a:1", 1, 4, 0),
        (2, "tcp://a:2", 2, 4, 0),
        (3, "tcp://a:2", 3, 4, 0),
        (4, "tcp://b:1", 0, 1, 1),
    ]
    assert {(s.world_size, s.nodes) for s in specs} == {(5, 2)}
    assert {worker: len(own) for worker, own in by_worker(specs).items()} == {
        "tcp://a:1": 2,
        "tcp://a:2": 2,
        "tcp://b:1": 1,
    }


def test_a_host_whose_workers_are_not_needed_does_not_count():
    assert {s.nodes for s in plan(workers(a=[1], b=[1]), slots=4, ranks=3)} == {1}


@pytest.mark.parametrize(
    ("gpus", "slots"),
    [
        ({"a:1": ["0", "1", "2", "3"]}, {"a:1": 4}),  # a worker for each machine
        ({"a:1": ["0", "1"], "b:1": ["0", "1"]}, {"a:1": 2, "b:1": 2}),  # two machines whose GPUs have the same names
        ({"a:1": ["0", "1"], "a:2": ["1", "0"]}, {"a:1": 1, "a:2": 1}),  # two workers that see both GPUs
        ({"a:1": ["0"], "a:2": ["1"]}, {"a:1": 1, "a:2": 1}),  # each has its own, as under SLURM
        ({"a:1": ["0", "1"], "a:2": ["2", "3"]}, {"a:1": 2, "a:2": 2}),
        ({"a:1": ["0", "1", "2"], "a:2": ["0", "1", "2"]}, {"a:1": 1, "a:2": 1}),
        ({"a:1": [], "a:2": []}, {"a:1": 1, "a:2": 1}),  # no GPUs
        ({"a:1": ["0"], "a:2": ["0"]}, {"a:1": 1, "a:2": 1}),  # more workers than GPUs
    ],
)
def test_the_gpus_of_a_worker_are_its_slots(gpus, slots):
    assert by_gpus(gpus, {address: address[0] for address in gpus}) == slots
