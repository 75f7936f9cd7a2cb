from __future__ import annotations

import threading
import time
from collections import Counter, deque, namedtuple
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.data import loader as loader_module
from ddp_hydra.data.draws import Indices
from ddp_hydra.data.loader import Loader
from ddp_hydra.errors import ConfigError
from tests.support.clocks import set_time

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")


@pytest.fixture
def all_slow(monkeypatch) -> None:
    """Hold each batch for slow, so that it is made ahead."""
    monkeypatch.setattr(loader_module, "QUICK_S", 0.0)


class Squares:
    """Sample i is (i, i * i); it may take its time, or fail."""

    thread_safe = True

    def __init__(self, delays: Iterable[float] = (), bad: int | None = None) -> None:
        self.delays = dict(enumerate(delays))
        self.bad = bad
        self.read: list[int] = []
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, int]:
        time.sleep(self.delays.get(index, 0))
        with self.lock:
            self.read.append(index)
        if index == self.bad:
            raise ValueError(f"sample {index} is bad")
        return index, index * index


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")]


def pairs(batches):
    return [(x.tolist(), y.tolist()) for x, y in batches]


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), max_size=6), st.integers(0, 4))
def test_batches_come_in_the_order_asked_for(batches, prefetch):
    loaded = pairs(Loader(Squares(), CPU, prefetch=prefetch).load(batches))
    assert loaded == [(batch, [index * index for index in batch]) for batch in batches]


@pytest.mark.usefixtures("all_slow")
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_so_many_batches_are_made_ahead_and_no_more(prefetch):
    data = Squares()
    loaded = Loader(data, CPU, prefetch=prefetch).load([[index] for index in range(50)])
    next(loaded)
    next(loaded)  # from the first one on it is known how large they are
    settle(data, prefetch + 2)
    assert sorted(data.read) == list(range(prefetch + 2))
    loaded.close()


@pytest.mark.medium
@pytest.mark.usefixtures("all_slow")
@pytest.mark.parametrize(("batches", "ahead"), [(3.5, 3), (0, 1)])
def test_batches_made_ahead_stay_within_the_memory_given_but_for_one(batches, ahead):
    data = Squares()
    batch = 2 * 8 * 1024  # bytes of x and y
    loader = Loader(data, CPU, prefetch=9, memory_mb=batches * batch / 2**20)
    loaded = loader.load([[index] * 1024 for index in range(50)])
    next(loaded)
    next(loaded)
    settle(data, (2 + ahead) * 1024)
    assert sorted(set(data.read)) == list(range(2 + ahead))
    loaded.close()


@pytest.mark.medium
def test_quick_batches_are_made_by_the_loop_and_slow_ones_again_in_threads(monkeypatch):
    clock = threading.local()  # a busy machine may hold a thread up
    set_time(monkeypatch, loader_module, perf_counter=lambda: getattr(clock, "now", 0.0))
    monkeypatch.setattr(loader_module, "QUICK_S", 0.15)
    made_by = {}

    class Noting(Squares):
        thread_safe = True

        def __getitem__(self, index):
            made_by[index] = threading.current_thread().name.partition("_")[0]
            clock.now = getattr(clock, "now", 0.0) + took[index]
            return super().__getitem__(index)

    took, data = [0.25] * 4 + [0] * 20 + [0.25] * 6, Noting()
    loaded = [x.item() for x, _ in Loader(data, CPU, prefetch=2).load([[index] for index in range(30)])]
    assert loaded == list(range(30))
    assert {made_by[index] for index in range(4)} == {"loader"}
    assert made_by[23] == "MainThread"
    assert made_by[29] == "loader"


def test_a_data_set_is_told_what_will_be_asked_for():
    class Expecting(Squares):
        def expect(self, indices):
            self.expected = list(indices)

    data = Expecting()
    assert pairs(Loader(data, CPU).load(iter([[3, 1], [2]]))) == [([3, 1], [9, 1]), ([2], [4])]
    assert data.expected == [3, 1, 2]


def settle(data: Squares, n: int) -> None:
    """Wait until so many samples are read, and for those that should not be."""
    deadline = time.monotonic() + 60
    while len(data.read) < n and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_time_waited_for_data_is_counted(prefetch):
    loader = Loader(Squares(delays=[0.5]), CPU, prefetch=prefetch)
    next(loaded := loader.load([[0], [1]]))
    loaded.close()
    assert loader.waited_s >= 0.04  # a busy machine may begin the wait later than the work


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_data_set_surfaces_where_its_batch_would_be(prefetch):
    loaded = Loader(Squares(bad=2), CPU, prefetch=prefetch).load([[0], [1], [2], [3]])
    assert [next(loaded)[0].item() for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="sample 2 is bad"):
        next(loaded)
    assert threads() == []

    def batches():
        yield [0]
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        pairs(Loader(Squares(), CPU, prefetch=prefetch).load(batches()))
    assert threads() == []


@pytest.mark.usefixtures("all_slow")
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("empty", [[], Indices([])])
def test_a_sampler_that_gives_an_empty_batch_is_told(empty, prefetch):
    steps = Loader(Squares(), CPU, prefetch=prefetch).steps([[0, 1], [2, 3], empty, [4]], 2)
    with pytest.raises(ConfigError, match=r"the sampler gave an empty batch: let its batches\(\) yield batch_size"):
        deque(map(list, steps), maxlen=0)


def test_closing_early_leaves_no_thread_and_reads_no_further():
    data = Squares(delays=[0.01] * 50)
    loaded = Loader(data, CPU).load([[index] for index in range(50)])
    next(loaded)
    assert threads()
    loaded.close()
    assert threads() == []
    assert len(data.read) <= 5


def test_a_data_set_may_read_collate_and_prepare_its_own_way():
    class Own(Squares):
        def __getitems__(self, indices):
            return [(-index, 0) for index in indices]

        def collate(self, samples):
            return {"x": torch.tensor([float(x) for x, _ in samples]), "note": "kept", "y": [torch.tensor(1)]}

        def prepare(self, batch):
            assert batch["note"] == "kept"
            return batch["x"] / 2, batch["y"][0]

    assert pairs(Loader(Own(), CPU).load([[1, 2]])) == [([-0.5, -1.0], 1)]


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu_by_way_of_pinned_memory():
    pinned = []

    class Watched(Squares):
        def prepare(self, batch):
            pinned.append(batch[0].is_cuda)
            return batch

    device = torch.device("cuda")
    assert pairs(Loader(Watched(), device).load([[1, 2], [3]])) == [([1, 2], [1, 4]), ([3], [9])]
    assert Loader(Watched(), device).make([1])[0].is_pinned()
    assert pinned == [True, True]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_progress_is_reported_for_each_sample_and_each_batch(prefetch):
    reports = []
    loader = Loader(Squares(), CPU, prefetch=prefetch, progress=lambda: reports.append(None))
    assert len(list(loader.load([[0, 1], [2]]))) == 2
    assert len(reports) == 3 + 2


def once(n: int, batch_size: int, rank: int, world_size: int) -> list[list[int]]:
    """The batches that a rank evaluates."""
    loaded = list(Loader(range(n), CPU, prefetch=0).each_once(batch_size, rank, world_size))
    assert all(batch.tolist() == indices for batch, indices in loaded)
    return [indices for _, indices in loaded]


@pytest.mark.medium
@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 9))
def test_evaluation_reads_every_sample_exactly_once(n, batch_size, world_size):
    shares = [once(n, batch_size, rank, world_size) for rank in range(world_size)]
    assert Counter(index for share in shares for batch in share for index in batch) == Counter(range(n))
    counts = [sum(map(len, share)) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert all(len(batch) == batch_size for share in shares for batch in share[:-1])
    assert all(1 <= len(share[-1]) <= batch_size for share in shares if share)
