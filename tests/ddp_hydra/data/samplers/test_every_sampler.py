"""What all samplers promise, whatever their order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from ddp_hydra.data.samplers import Chunked, Distributed, Sampler, Sharded, Weighted
from ddp_hydra.errors import ConfigError


@dataclass
class Kind:
    """A sampler and its options for a data set of some length."""

    sampler: type[Sampler]
    options: dict[str, Any]

    def ranks(self, n: int, batch_size: int, world_size: int, **more: Any) -> list[Sampler]:
        return [self.sampler(n, batch_size, rank, world_size, **self.options, **more) for rank in range(world_size)]


@st.composite
def kinds(draw, n: int) -> Kind:
    """Any sampler for `n` samples."""
    which = draw(st.sampled_from(["distributed", "sequential", "chunked", "shards", "sharded", "weighted"]))
    shuffle = draw(st.booleans())
    lanes = draw(st.integers(1, 9))
    if which == "chunked":
        return Kind(Chunked, {"chunk_samples": draw(st.integers(1, 20)), "interleave": lanes, "shuffle": shuffle})
    if which == "shards":
        cuts = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
        lengths = np.diff([0, *cuts, n]).tolist()
        return Kind(Chunked, {"shard_lengths": lengths, "interleave": lanes, "shuffle": shuffle})
    if which == "sharded":
        return Kind(Sharded, {"interleave": lanes, "shuffle": shuffle})
    if which == "weighted":
        targets = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
        return Kind(Weighted, {"targets": targets, "balance": draw(st.sampled_from([0, 0.5, 1]))})
    return Kind(Distributed, {"shuffle": which == "distributed"})


@st.composite
def cases(draw) -> tuple[int, Kind, bool]:
    """Number of samples, a sampler for them, and whether it drops the rest."""
    n = draw(st.integers(1, 60))
    return n, draw(kinds(n)), draw(st.booleans())


def steps(kind: Kind, n: int, batch_size: int, world_size: int, epoch: int, position: int = 0, **more) -> list[Counter]:
    """What all ranks together read in each step."""
    shares = [list(sampler.batches(epoch, position)) for sampler in kind.ranks(n, batch_size, world_size, **more)]
    return [Counter(index for batch in step for index in batch) for step in zip(*shares, strict=True)]


batch_sizes, worlds, epochs = st.integers(1, 7), st.integers(1, 5), st.integers(0, 3)


@given(cases(), batch_sizes, worlds, epochs, st.integers())
def test_every_rank_has_equally_many_full_batches_and_as_many_as_it_says(case, batch_size, world_size, epoch, seed):
    n, kind, drop_last = case
    assume(not drop_last or n >= batch_size * world_size)
    for sampler in kind.ranks(n, batch_size, world_size, drop_last=drop_last, seed=seed):
        batches = list(sampler.batches(epoch))
        assert len(batches) == len(sampler) >= 1
        assert {len(batch) for batch in batches} == {batch_size}
        assert {type(index) for batch in batches for index in batch} == {int}


@given(cases(), batch_sizes, worlds, epochs)
def test_every_sample_is_read_once_in_an_epoch_by_one_rank(case, batch_size, world_size, epoch):
    n, kind, _ = case
    assume(kind.sampler is not Weighted)
    order = kind.ranks(n, batch_size, world_size, drop_last=False)[0].order(epoch).tolist()
    assert sorted(order) == list(range(n))
    read = sum(steps(kind, n, batch_size, world_size, epoch, drop_last=False), Counter())
    filling = Counter((order * read.total())[n : read.total()])
    assert read == Counter(order) + filling
    assert filling.total() < batch_size * world_size
    if n >= batch_size * world_size:
        dropped = sum(steps(kind, n, batch_size, world_size, epoch), Counter())
        assert dropped == Counter(order[: n // (batch_size * world_size) * batch_size * world_size])


@given(cases(), batch_sizes, worlds, batch_sizes, worlds, epochs, st.data())
def test_a_run_goes_on_at_any_sample_with_any_other_ranks_and_batches(
    case, old_batch, old_world, new_batch, new_world, epoch, data
):
    n, kind, drop_last = case
    assume(not drop_last or n >= max(old_batch * old_world, new_batch * new_world))
    old = kind.ranks(n, old_batch, old_world, drop_last=drop_last)[0]
    done = data.draw(st.integers(0, len(old)))
    position = done * old.global_batch
    sequence = old.order(epoch).tolist()
    before = steps(kind, n, old_batch, old_world, epoch, drop_last=drop_last)[:done]
    assert sum(before, Counter()) == Counter((sequence * 2 * old.global_batch)[:position])
    after = steps(kind, n, new_batch, new_world, epoch, position, drop_last=drop_last)
    wanted = (sequence * 2 * new_batch * new_world)[position:]
    for number, step in enumerate(after):
        assert step == Counter(wanted[number * step.total() : (number + 1) * step.total()])
    left = n - position - sum(step.total() for step in after)
    assert left < new_batch * new_world
    assert drop_last or left <= 0  # nothing is left out


@given(cases(), st.sampled_from([(1, 12), (2, 6), (3, 4), (6, 2), (12, 1)]), epochs)
def test_the_same_global_batches_come_with_any_number_of_ranks(case, shape, epoch):
    n, kind, drop_last = case
    assume(not drop_last or n >= 12)
    assert steps(kind, n, *shape, epoch, drop_last=drop_last) == steps(kind, n, 12, 1, epoch, drop_last=drop_last)


@given(cases(), epochs)
def test_the_order_is_a_function_of_seed_and_epoch(case, epoch):
    n, kind, _ = case
    one, other = kind.ranks(n, 1, 1, seed=7)[0], kind.ranks(n, 1, 3, seed=7, drop_last=False)[2]
    assert one.order(epoch).tolist() == other.order(epoch).tolist() == one.order(epoch).tolist()


@pytest.mark.parametrize(
    "sampler",
    [
        Distributed(64, 4, seed=1),
        Chunked(64, 4, seed=1, shard_lengths=[16] * 4, interleave=2),
        Sharded(64, 4, seed=1, interleave=4),
        Weighted(64, 4, seed=1, targets=[0, 1] * 32),
    ],
)
def test_epochs_and_seeds_differ(sampler):
    orders = {tuple(sampler.order(epoch)) for epoch in range(4)}
    sampler.seed = 2
    assert len(orders | {tuple(sampler.order(epoch)) for epoch in range(4, 8)}) == 8


def test_it_is_a_batch_sampler_for_a_plain_data_loader():
    sampler = Distributed(10, 2, rank=1, world_size=2, seed=3)
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_sampler=sampler)
    sampler.set_epoch(1)
    assert [batch.tolist() for (batch,) in loader] == list(sampler.batches(1))
    assert len(loader) == len(sampler) == 2


@dataclass
class OfAUser(Sampler):
    """Leaves out the first sample."""

    sets_length: bool = True

    def __post_init__(self) -> None:
        if self.sets_length:
            self.n_samples -= 1
        super().__post_init__()

    def order(self, epoch: int) -> Any:
        return torch.arange(1, 9)


def test_the_order_of_a_users_sampler_may_be_any_sequence_of_n_samples():
    assert [list(OfAUser(9, 2, rank, 2)) for rank in range(2)] == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    with pytest.raises(ConfigError, match=r"OfAUser\.order\(0\) has 8 indices, and n_samples is 9: set"):
        list(OfAUser(9, 2, sets_length=False))
