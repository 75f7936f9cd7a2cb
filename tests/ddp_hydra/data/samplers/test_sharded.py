"""Which rank reads which shards, and how they are mixed."""

from __future__ import annotations

import pytest

from ddp_hydra.data.samplers import Chunked, Sharded
from ddp_hydra.errors import ConfigError


def shards_of(rank: int, world_size: int, epoch: int = 0, **options) -> list[set[int]]:
    """The shards, of 8 samples each, that each batch of a rank reads from."""
    sampler = Chunked(512, 8, rank, world_size, shard_lengths=[8] * 64, **options)
    return [{index // 8 for index in batch} for batch in sampler.batches(epoch)]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_rank_stays_in_its_lanes_where_ranks_divide_them(world_size):
    read = [set().union(*shards_of(rank, world_size)) for rank in range(world_size)]
    assert sum(map(len, read)) == len(set().union(*read)) == 64


@pytest.mark.parametrize("world_size", [3, 5, 7, 16])
def test_other_numbers_of_ranks_share_few_shards(world_size):
    read = [set().union(*shards_of(rank, world_size)) for rank in range(world_size)]
    assert set().union(*read) == set(range(64))
    assert sum(map(len, read)) <= 64 * 3


def test_at_any_time_as_many_shards_are_mixed_as_there_are_lanes():
    for lanes in (1, 2, 8):
        batches = shards_of(0, 1, interleave=lanes)
        assert max(map(len, batches)) <= lanes
        assert len(batches[5]) == min(lanes, 8)


def test_a_shard_is_read_in_one_go():
    """Between its first and its last batch no more is read than its lane's share."""
    batches = shards_of(0, 1, interleave=4)
    for shard in range(64):
        seen = [number for number, batch in enumerate(batches) if shard in batch]
        assert seen[-1] - seen[0] < 8 * 4 // 8 + 1


def test_shards_are_dealt_to_the_ranks_anew_each_epoch():
    dealt = [frozenset(set().union(*shards_of(0, 4, epoch))) for epoch in range(5)]
    assert len(set(dealt)) == 5
    assert all(len(shards) == 16 for shards in dealt)


def test_lanes_of_unequal_shards_end_together():
    sampler = Chunked(110, 2, shard_lengths=[100, 10], interleave=2, shuffle=False)
    order = sampler.order(0).tolist()
    assert max(order.index(99), order.index(109)) == 109
    assert min(order.index(99), order.index(109)) > 100


def test_a_data_set_without_shards_is_cut_into_chunks():
    sampler = Chunked(25, 5, chunk_samples=10, interleave=1, shuffle=False)
    assert sampler.order(0).tolist() == list(range(25))
    chunks = [{index // 10 for index in batch} for batch in Chunked(40, 5, chunk_samples=10, interleave=1).batches(0)]
    assert all(len(chunk) == 1 for chunk in chunks)


def test_sharded_gives_each_rank_its_contiguous_part_in_every_epoch():
    for epoch in range(3):
        for rank in range(4):
            read = [i for batch in Sharded(80, 5, rank, 4, interleave=4, seed=2).batches(epoch) for i in batch]
            assert sorted(read) == list(range(20 * rank, 20 * (rank + 1))) != read
    read = [index for batch in Sharded(80, 5, 1, 4, interleave=4, shuffle=False).batches(3) for index in batch]
    assert read == list(range(20, 40))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Chunked(10, 2, shard_lengths=[4, 4]), "shards have 8 samples and the data set 10"),
        (lambda: Chunked(10, 2, interleave=0), r"sampler\.interleave=0"),
        (lambda: Chunked(10, 2, chunk_samples=0), r"sampler\.chunk_samples=0"),
        (lambda: Sharded(10, 2, interleave=-1), r"sampler\.interleave=-1"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
