"""What a data set draws is a function of seed, epoch and position, whatever the split of the samples."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

from ddp_hydra.data import wrappers
from ddp_hydra.data.draws import StateGuard, numbered, ordered
from ddp_hydra.data.loader import Loader
from ddp_hydra.data.samplers import Chunked, Distributed, Repeated, Weighted
from ddp_hydra.data.streams import StreamLoader, StreamSampler
from ddp_hydra.data.streams import split as split_stream

CPU = torch.device("cpu")
N = 48


class Drawing:
    """Sample i is i and a draw from each global generator."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


class Stream:
    """The same one after the other."""

    def __iter__(self):
        return (Drawing()[index] for index in range(N))


def rows(batch) -> list[tuple[float, ...]]:
    return [tuple(row) for row in zip(*(part.tolist() for part in batch), strict=True)]


def trained_on(data, ranks: int, batch: int, micro: int, epoch: int, stop: int, kind=Distributed, seed=7) -> list:
    """The samples of an epoch in the order of steps; with a stop and a resume after so many steps."""
    steps: dict[int, list] = {}
    for rank in range(ranks):
        for begin, end in ((0, stop), (stop, None)):
            sampler = kind(N, batch, rank, ranks, seed=3)
            position = begin * sampler.global_batch
            batches = numbered(sampler.batches(epoch, position), epoch, position, sampler.global_batch, rank)
            loaded = Loader(data, CPU, seed=seed).steps(batches, micro)
            for number, parts in enumerate(loaded, begin):
                found = [row for part in parts for row in rows(part.batch)]
                if number == end:
                    break
                torch.rand(3), random.random()  # as a step does
                steps.setdefault(number, []).extend(found)
    return [row for number in sorted(steps) for row in steps[number]]


@pytest.mark.medium
@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([2, 4]), st.integers(1, 2), st.integers(0, 1), st.integers(0, 4))
def test_draws_do_not_depend_on_the_split(ranks, batch, micro, epoch, stop):
    right = trained_on(Drawing(), 1, 48, 1, epoch, 0)
    assert trained_on(Drawing(), ranks, batch, micro, epoch, stop) == right
    assert len({row[1:] for row in right}) == N
    nested = wrappers.look_into(Subset(Subset(Drawing(2 * N), range(N, 2 * N)), range(N)))
    assert [row[1:] for row in trained_on(nested, ranks, batch, micro, epoch, stop)] == [row[1:] for row in right]
    two = wrappers.look_into(ConcatDataset([Drawing(N // 2), Drawing(N // 2)]))
    assert [row[1:] for row in trained_on(two, ranks, batch, micro, epoch, stop)] == [row[1:] for row in right]


def test_draws_differ_by_epoch_and_seed_and_for_a_sample_that_comes_twice():
    first, later = (trained_on(Drawing(), 1, 4, 1, epoch, 0) for epoch in (0, 1))
    other = trained_on(Drawing(), 1, 4, 1, 0, 0, seed=8)
    assert len({row[1:] for row in [*first, *later, *other]}) == 3 * N
    targets = np.arange(N) % 2

    def weighted(*args, **options):
        return Weighted(*args, **options, targets=targets)

    drawn = trained_on(Drawing(), 2, 4, 1, 0, 0, weighted)
    assert len({row[0] for row in drawn}) < len(drawn) == len({row[1:] for row in drawn})
    again = Repeated(Distributed(N, 4), 2)
    loaded = Loader(Drawing(), CPU).load(numbered(again.batches(0), 0, 0, 4, 0))
    drawn = [row for batch in loaded for row in rows(batch)]
    assert len({row[0] for row in drawn}) == 8
    assert len({row[1:] for row in drawn}) == N


def test_what_fills_the_last_batch_is_drawn_anew():
    batches = Distributed(5, 4, seed=1, drop_last=False).batches(0)
    drawn = [row for batch in Loader(Drawing(5), CPU).load(batches) for row in rows(batch)]
    assert len({row[0] for row in drawn}) == 5
    assert len({row[1:] for row in drawn}) == 8


@pytest.mark.medium
@given(st.integers(1, 3), st.integers(1, 5))
def test_validation_draws_by_index_alone(ranks, batch):
    found = {}
    for rank in range(ranks):
        for loaded, _ in Loader(Drawing(), CPU, seed=7).each_once(batch, rank, ranks):
            found |= {row[0]: row[1:] for row in rows(loaded)}
    right = {row[0]: row[1:] for one, _ in Loader(Drawing(), CPU, seed=7).each_once(N, 0, 1) for row in rows(one)}
    assert found == right


@pytest.mark.medium
@given(st.sampled_from([1, 2, 4]), st.sampled_from([2, 4]), st.integers(0, 2))
def test_a_stream_draws_by_position(ranks, batch, epoch):
    def read(ranks: int, batch: int, stop: int) -> dict:
        found = {}
        for rank in range(ranks):
            for position in (0, stop * batch * ranks):
                part = split_stream(Stream(), rank, ranks, "samples", seed=7)
                sampler = StreamSampler(part, batch)
                loader = StreamLoader(Stream(), CPU, seed=7)
                for parts in loader.steps(sampler.batches(epoch, position), 1):
                    found |= {row[0]: row[1:] for one in parts for row in rows(one.batch)}
        return found

    assert read(ranks, batch, 2) == read(1, 48, 0)


def test_loading_and_training_do_not_disturb_each_other():
    draw = lambda: (torch.rand(()).item(), float(np.random.rand()), random.random())  # noqa: E731
    for data in (Drawing(), wrappers.look_into(Subset(Drawing(), range(N)))):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(5)
        expected = [draw() for _ in range(4)]
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(5)
        loaded = Loader(data, CPU).load([[0, 1], [2], [3], [4]])
        assert [draw() for _ in loaded] == expected


def test_a_collate_draws_by_the_place_of_its_batch():
    class Collating(Drawing):
        def collate(self, samples):
            return torch.rand(2)

    sampler = Chunked(N, 4, shard_lengths=[8] * 6)
    first, again = (list(Loader(Collating(), CPU, seed=7).load(sampler.batches(0))) for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert len({one.tolist()[0] for one in first}) == len(first)


class Multinomial(Distributed):
    def order(self, epoch):
        more = np.random.permutation(self.n_samples) + random.randrange(self.n_samples)
        return (torch.multinomial(torch.ones(self.n_samples), self.n_samples).numpy() + more) % self.n_samples


class Generating(Distributed):
    def batches(self, epoch, position=0):
        order = torch.randperm(self.n_samples).tolist()
        for start in range(position, self.n_samples, self.global_batch):
            yield order[start + self.rank * self.batch_size :][: self.batch_size]


@pytest.mark.parametrize("kind", [Multinomial, Generating])
def test_an_order_from_the_global_generators_is_that_of_all_ranks_and_of_a_resume(kind):
    def read(epoch, position=0, rank=0, ranks=1, wrap=lambda sampler: sampler, seed=7):
        torch.rand(3), np.random.rand(), random.random()  # as training does
        return list(ordered(wrap(kind(N, 4, rank, ranks)).batches, epoch, position, seed))

    whole = read(1)
    assert read(1, 8) == whole[2:]
    both = zip(read(1, 0, 0, 2), read(1, 0, 1, 2), strict=True)
    assert [batch for pair in both for batch in pair] == whole
    assert whole not in (read(0), read(1, seed=8))
    again = [read(epoch, wrap=lambda sampler: Repeated(sampler, 2, 7)) for epoch in (0, 1)]
    assert again[0] == again[1]
    assert again[0][:2] == again[0][2:4] == read(0)[:2]
    guard = StateGuard()
    ordered(kind(N, 4).batches, 0, 0, 7)
    assert not guard.has_moved()
