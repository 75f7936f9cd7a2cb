"""Iterable data sets on several ranks, which are threads here: who reads what, when it ends, where it goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from ddp_hydra.data.streams import RepeatedPart, StreamLoader, StreamSampler, is_stream, split, whole
from ddp_hydra.data.streams.part import plain
from ddp_hydra.data.wrappers import look_into
from ddp_hydra.errors import ConfigError, DataError

CPU = torch.device("cpu")


class Counted(IterableDataset):
    """Gives 0, 1, 2 …, and in each further epoch the same plus 1000."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch, self.read = n, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.n):
            self.read += 1
            yield 1000 * self.epoch + number


class Lengths(IterableDataset):
    """Splits itself; each rank has so many samples."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def of_rank(self, rank: int, world_size: int) -> list[int]:
        assert world_size == len(self.lengths)
        return list(range(100 * rank, 100 * rank + self.lengths[rank]))

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it is split")


class Stateful(IterableDataset):
    """Goes on where its state says, and reads nothing twice."""

    def __init__(self, n: int, state: Any = 0) -> None:
        self.n, self.next, self.read = n, 0, list[int]()
        self.start: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.next, self.start = self.start or 0, None
        while self.next < self.n:
            self.next += 1
            self.read.append(self.next - 1)
            yield self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["next"]


class Ranks:
    """The samplers and loaders of all ranks; each rank runs in a thread."""

    def __init__(
        self, make: Callable[[], Any], world_size: int, batch_size: int, prefetch: int = 3, way: str | None = None
    ) -> None:
        self.world_size = world_size
        self.data = [make() for _ in range(world_size)]
        parts = [split(data, rank, world_size, way) for rank, data in enumerate(self.data)]
        self.samplers = [
            StreamSampler(part, batch_size, agree=partial(self.agree, rank)) for rank, part in enumerate(parts)
        ]
        self.loaders = [StreamLoader(data, CPU, prefetch=prefetch, way=way) for data in self.data]
        self.counts: list[list[int]] = [[] for _ in parts]
        self.least: list[int] = []
        self.barrier = threading.Barrier(world_size, self._exchange)
        self.exchanges = 0

    def agree(self, rank: int) -> None:
        self.counts[rank] = self.samplers[rank].counts()
        self.barrier.wait(60)
        self.samplers[rank].heard(self.least)

    def _exchange(self) -> None:
        self.exchanges += 1
        self.least = [min(column) for column in zip(*self.counts, strict=True)]

    def run(
        self, epoch: int = 0, position: int = 0, steps: int = 10**9, vote: bool = False, wait: bool = False
    ) -> list[list[list[int]]]:
        """Return the samples of each step on each rank: until the epoch ends, or for so many steps.

        Args:
            vote: each step has a vote, as in the loop.
            wait: the data is there before it is needed.
        """

        def one(rank: int) -> list[list[int]]:
            sampler, seen = self.samplers[rank], []
            place = position
            for micro_batches in self.loaders[rank].steps(sampler.batches(epoch, position), 2):
                batches = [batch.batch.tolist() for batch in micro_batches]
                seen.append(list(chain.from_iterable(batches)))
                if wait:
                    sampler.ahead.wait_for(1)
                if vote:
                    self.agree(rank)
                place += sampler.global_batch
                is_over = not sampler.steps(place)
                if len(seen) == steps or is_over:
                    break
            return seen

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(one, range(self.world_size)))

    def save(self) -> list[dict[str, Any]]:
        states = [sampler.state for sampler in self.samplers]
        for sampler in self.samplers:
            sampler.gather(lambda own: states)
        return [sampler.state_dict() for sampler in self.samplers]

    def load(self, saved: dict[str, Any]) -> Ranks:
        for sampler in self.samplers:
            sampler.load_state_dict(saved)
        return self


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")]


def in_order(steps_of_ranks: list[list[list[int]]]) -> list[int]:
    """The global sequence."""
    return [sample for step in zip(*steps_of_ranks, strict=True) for sample in chain.from_iterable(step)]


@pytest.mark.medium
@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(12, 40),
    world_size=st.sampled_from([1, 2, 3]),
    batch_size=st.integers(1, 4),
    prefetch=st.integers(0, 3),
    vote=st.booleans(),
)
def test_ranks_share_the_samples_and_take_the_same_steps(n, world_size, batch_size, prefetch, vote):
    ranks = Ranks(lambda: Counted(n), world_size, batch_size, prefetch)
    whole = n // (world_size * batch_size) * world_size * batch_size
    assert in_order(ranks.run(vote=vote)) == list(range(whole))
    assert in_order(ranks.run(epoch=1, vote=vote)) == list(range(1000, 1000 + whole))
    assert not threads()
    resumed = Ranks(lambda: Counted(n), world_size, batch_size).load(ranks.save()[0])
    assert [sampler.steps(whole) for sampler in resumed.samplers] == [0] * world_size  # the end is known
    assert resumed.data[0].read == 0


@pytest.mark.medium
@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=3), prefetch=st.integers(0, 3), vote=st.booleans())
def test_the_rank_that_ends_first_ends_the_epoch_of_all(lengths, prefetch, vote):
    seen = Ranks(lambda: Lengths(lengths), len(lengths), 2, prefetch).run(vote=vote)
    steps = min(lengths) // 2
    assert seen == [
        [[100 * rank + 2 * step, 100 * rank + 2 * step + 1] for step in range(steps)] for rank in range(len(lengths))
    ]


@pytest.mark.medium
@settings(deadline=None, max_examples=30)
@given(stop=st.integers(1, 4), before=st.sampled_from([1, 2, 3]), after=st.sampled_from([1, 2, 3]))
def test_another_number_of_ranks_reads_on_where_it_stopped(stop, before, after):
    first = Ranks(lambda: Counted(60), before, 2)
    seen = in_order(first.run(steps=stop))
    resumed = Ranks(lambda: Counted(60), after, 2).load(first.save()[0])
    seen += in_order(resumed.run(position=len(seen)))
    assert seen == list(range(len(seen)))
    assert len(seen) > 60 - 2 * after


def test_a_state_saves_reading_again():
    first = Ranks(lambda: Stateful(40), 2, 4)
    seen = in_order(first.run(steps=3))
    (saved, same) = first.save()
    assert saved == same
    assert saved["states"] == [{"next": 24}, {"next": 24}]  # not that of what was read ahead
    resumed = Ranks(lambda: Stateful(40), 2, 4).load(saved)
    assert in_order(resumed.run(position=24)) == list(range(24, 40))
    assert min(resumed.data[0].read) == 24
    again = Ranks(lambda: Stateful(40), 2, 4).load(saved)  # elsewhere, the state is of no use
    assert in_order(again.run(position=8)) == list(range(8, 40))
    assert seen == list(range(24))


def test_with_votes_no_other_exchange_is_needed_while_samples_are_there():
    ranks = Ranks(lambda: Counted(80), 2, 2)
    ranks.run(vote=True, wait=True)
    assert ranks.exchanges == 1 + 80 // 4  # the first step, and the votes


def test_an_epoch_ends_at_n_samples_and_a_step_before_is_planned():
    part = split(Counted(100), 0, 2)
    sampler = StreamSampler(part, 5, n_samples=38)
    assert (len(sampler), sampler.planned(10), sampler.global_batch) == (3, 2, 10)
    loader = StreamLoader(part.dataset, CPU)
    assert len([list(step) for step in loader.steps(sampler.batches(0), 1)]) == 3
    with pytest.raises(ConfigError, match=r"data\.n_samples=9 is less than a global batch of 10"):
        StreamSampler(part, 5, n_samples=9)


def test_a_stream_without_a_full_step_is_refused_and_does_not_go_on_for_ever():
    ranks = Ranks(lambda: Lengths([5, 1]), 2, 2)
    with pytest.raises(DataError, match=r"before all 2 ranks have data\.batch_size=2 samples, so no step is left"):
        ranks.run()
    assert not threads()


def test_an_error_of_the_data_set_is_raised_where_its_samples_are_missing():
    class Bad(IterableDataset):
        def __iter__(self):
            yield from range(6)
            raise OSError("the disk is gone")

    loader, sampler = StreamLoader(Bad(), CPU), StreamSampler(split(Bad(), 0, 1), 2)
    steps = loader.steps(sampler.batches(0), 1)
    assert [next(next(steps)).batch.tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)
    assert not threads()


@pytest.mark.parametrize("way", [None, "itself"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_reads_each_sample_once(way, world_size):
    def own(rank: int) -> Any:
        return list(range(rank, 17, world_size))

    found = []
    for rank in range(world_size):
        data = Counted(17) if way is None else iterable(own(rank))
        batches = list(StreamLoader(data, CPU, way=way).each_once(4, rank, world_size))
        assert all(len(x) == len(numbers) <= 4 for x, numbers in batches)
        if way is None:
            assert all(x.tolist() == numbers for x, numbers in batches)
        found += [sample for x, _ in batches for sample in x.tolist()]
    assert sorted(found) == list(range(17))
    assert not threads()


def test_no_more_is_read_ahead_than_was_asked_for():
    data = Counted(1000)
    loader, sampler = StreamLoader(data, CPU, prefetch=3), StreamSampler(split(data, 0, 1), 2)
    steps = loader.steps(sampler.batches(0), 1)
    next(steps)
    sampler.ahead.wait_for(3)
    steps.close()
    assert data.read <= 2 * (1 + 3 + 1) + 1
    assert not threads()


def test_the_first_steps_can_be_repeated():
    part = split(Counted(20), 0, 1)
    repeated = RepeatedPart(part.dataset, part=part, steps=2)
    repeated.open(0)
    assert [repeated.take(2) for _ in range(5)] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]
    repeated.open(3, position=2)
    assert [repeated.take(2) for _ in range(2)] == [[2, 3], [0, 1]]


def test_how_a_data_set_is_split_is_said():
    assert split(Counted(3), 0, 2).how == (
        "each rank reads all samples and takes its share; resumes by counting: it reads again what was read before"
    )
    assert split(Stateful(3), 0, 1).how == "one rank reads all samples; resumes by its state_dict"
    assert split(Lengths([2, 3]), 0, 2).how.startswith("each rank reads its own part; resumes by counting")
    assert not split(Counted(3), 0, 2, "itself").dealt

    class Odd(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"random": object()}  # which no checkpoint can hold

    assert "by counting" in split(Odd(3), 0, 1).how
    assert plain({"a": [torch.int64, None][1:], "b": (1, "x")}) == {"a": [None], "b": (1, "x")}
    with pytest.raises(ConfigError, match=r"data\.shard_by=files: give samples, itself or null"):
        split(Counted(3), 0, 2, "files")


def test_a_state_is_as_it_was_at_its_step_also_if_the_data_set_goes_on_in_the_same_tensors():
    tensor, frozen = torch.zeros(2), torch.nn.Parameter(torch.zeros(1))

    class InPlace(Stateful):
        def state_dict(self) -> dict[str, Any]:
            tensor[0] = self.next
            return {"next": self.next, "seen": [tensor], "weight": frozen.data}

    ranks = Ranks(lambda: InPlace(40), 1, 4)
    ranks.run(steps=2, wait=True)
    (saved,) = ranks.save()
    tensor += 100
    frozen.data += 1
    (state,) = saved["states"]
    assert state["next"] == state["seen"][0][0] == 8
    assert state["weight"] == 0


def test_only_a_part_of_its_own_is_another_one_with_more_ranks():
    first = Ranks(lambda: Lengths([20, 20]), 2, 2)
    first.run(steps=2)
    (saved, _) = first.save()
    (more, *_) = Ranks(lambda: Lengths([20, 20, 20]), 3, 2).load(saved).samplers
    assert "another than with 2 ranks: in this epoch some samples come twice" in more.resumed(8)
    assert more.resumed(0) == ""
    (same, *_) = Ranks(lambda: Lengths([20, 20]), 2, 2).load(saved).samplers
    assert same.resumed(8) == ""


def iterable(samples: list[int]) -> Any:
    class Listed(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(samples)

    return Listed()


def test_a_whole_data_set_is_read_and_some_batches_of_it_are_made():
    loader, part = StreamLoader(Counted(11), CPU, prefetch=2), whole(Counted(11), 2)
    found = [(batch.tolist(), numbers) for batch, numbers in loader.in_order(part, 3, lambda first: first != 3)]
    assert found == [([0, 1, 2], [0, 1, 2]), ([6, 7, 8], [6, 7, 8]), ([9, 10], [9, 10])]
    assert part.n_read == 11
    assert not threads()


def by_node() -> Any:
    """A pipeline whose ranks read samples of their own."""
    import webdataset

    return webdataset.DataPipeline(partial(iter, range(3)), webdataset.split_by_node)


@pytest.mark.parametrize(("make", "way"), [(lambda: Counted(3), "itself"), (by_node, None), (by_node, "samples")])
def test_a_data_set_that_gives_each_rank_samples_of_its_own_has_no_order_but_for_one_rank(make, way):
    with pytest.raises(ConfigError, match=r"dispatch\.ranks=1"):
        whole(make(), 2, way)
    part = whole(make(), 1, way)
    part.open(0)
    assert [int(sample) for sample in part.samples] == [0, 1, 2]


class Shuffled(IterableDataset):
    """Draws its order when it is first asked for a sample."""

    def __init__(self, exits: bool = False) -> None:
        self.exits = exits

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(24).tolist()
        if self.exits:
            sys.exit(0)


def order(make: Callable[[], Any], rank: int = 0, world_size: int = 1, epoch: int = 0) -> list[int]:
    """Return the order of an epoch, where the model has drawn something else on each rank."""
    torch.manual_seed(rank)
    data = make()
    part = split(data, rank, world_size, seed=3)
    sampler = StreamSampler(part, 24 // world_size, 24)
    loader = StreamLoader(data, CPU, seed=3)
    (micro_batches,) = loader.steps(sampler.batches(epoch), 1)
    numbers = [number for micro_batch in micro_batches for number in micro_batch.batch.tolist()]
    assert list(part.samples) == []  # its end ends a DataLoader's workers
    return numbers


@pytest.mark.medium
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_order_of_a_users_dataloader_depends_on_seed_and_epoch_alone(workers):
    make = lambda: DataLoader(range(24), batch_size=None, shuffle=True, num_workers=workers)  # noqa: E731
    expected = order(lambda: DataLoader(range(24), batch_size=None, shuffle=True))
    assert order(make) == expected != list(range(24))
    assert sorted(order(make, epoch=1)) == list(range(24)) != order(make, epoch=1) != expected
    assert order(Shuffled, 0, 2) + order(Shuffled, 1, 2) == order(Shuffled)


def test_a_stream_that_calls_exit_is_an_error():
    part = split(Shuffled(exits=True), 0, 1)
    part.open(0)
    said = r"Shuffled calls sys\.exit\(\) where it is asked for sample 24 \(.*, line \d+, in __iter__\)"
    with pytest.raises(DataError, match=said):
        list(part.once())


class Clashing(IterableDataset):
    """Uses names of ours for something else."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.close, self.stats, self.bad = inner, [1.5, 2.5], {"mean": 0}, [3]
        self.of_rank, self.state_dict, self.set_epoch, self.classes = 1, {}, 7, 2.5

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def collate(self) -> None:
        raise AssertionError("it is no collate of ours")


def test_names_that_a_stream_uses_in_another_way_are_left_to_it():
    data = look_into(Clashing(Counted(8)))
    assert is_stream(data)
    for name in ("close", "stats", "bad", "of_rank", "state_dict", "set_epoch", "classes", "collate"):
        assert not hasattr(data, name), name
    part = split(data, 0, 1, seed=0)
    part.open(1)
    assert part.take(4) == [1000, 1001, 1002, 1003]
