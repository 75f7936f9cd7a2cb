from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.errors import ConfigError

sizes = st.integers(1, 60)
epochs = st.integers(0, 3)


def ranks(n_samples, batch_size, world_size, **options):
    return [Distributed(n_samples, batch_size, rank, world_size, **options) for rank in range(world_size)]


def global_sequence(n_samples, batch_size, world_size, epoch, position=0, **options):
    """What all ranks together read, in order of steps and then of ranks."""
    shares = [list(s.batches(epoch, position)) for s in ranks(n_samples, batch_size, world_size, **options)]
    return [index for step in zip(*shares, strict=True) for batch in step for index in batch]


@given(sizes, st.integers(1, 7), st.integers(1, 5), epochs, st.integers(), st.booleans(), st.booleans())
def test_every_rank_has_the_same_number_of_full_batches(n, batch_size, world_size, epoch, seed, shuffle, drop_last):
    assume(not drop_last or n >= batch_size * world_size)
    for sampler in ranks(n, batch_size, world_size, seed=seed, shuffle=shuffle, drop_last=drop_last):
        batches = list(sampler.batches(epoch))
        assert len(batches) == len(sampler) >= 1
        assert {len(batch) for batch in batches} == {batch_size}
        assert {type(index) for batch in batches for index in batch} == {int}


@given(sizes, st.integers(1, 7), st.integers(1, 5), epochs, st.booleans())
def test_dropping_the_rest_no_sample_is_read_twice_and_less_than_a_global_batch_is_missed(
    n, batch_size, world_size, epoch, shuffle
):
    assume(n >= batch_size * world_size)
    read = global_sequence(n, batch_size, world_size, epoch, shuffle=shuffle)
    assert len(read) == len(set(read)) > n - batch_size * world_size
    assert set(read) <= set(range(n))


@given(sizes, st.integers(1, 7), st.integers(1, 5), epochs, st.booleans())
def test_filling_up_every_sample_is_read_and_the_filling_comes_from_the_beginning(
    n, batch_size, world_size, epoch, shuffle
):
    read = global_sequence(n, batch_size, world_size, epoch, shuffle=shuffle, drop_last=False)
    assert sorted(read[:n]) == list(range(n))
    assert read[n:] == (read[:n] * len(read))[: len(read) - n]
    assert len(read) - n < batch_size * world_size


@given(st.sampled_from([1, 2, 4, 6, 12]), sizes, epochs, st.booleans(), st.booleans(), st.data())
def test_a_run_goes_on_where_it_was_with_any_other_number_of_ranks(global_batch, n, epoch, shuffle, drop_last, data):
    assume(not drop_last or n >= global_batch)
    old, new = (
        data.draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 12) if global_batch % size == 0])) for _ in range(2)
    )
    options = {"epoch": epoch, "shuffle": shuffle, "drop_last": drop_last, "seed": 5}
    whole = global_sequence(n, global_batch // old, old, **options)
    position = global_batch * data.draw(st.integers(0, len(whole) // global_batch))
    rest = global_sequence(n, global_batch // new, new, position=position, **options)
    assert rest == whole[position:]


@given(st.integers(30, 60), st.integers(1, 5), st.integers(1, 5), st.integers(0, 20))
def test_another_global_batch_still_reads_on_from_the_same_sample(n, old_batch, new_batch, steps):
    position = min(steps, n // old_batch) * old_batch
    rest = global_sequence(n, new_batch, 1, epoch=2, position=position)
    whole = Distributed(n, 1).order(2).tolist()
    assert rest == whole[position : position + len(rest)]
    assert len(whole) - position - len(rest) < 2 * new_batch


def test_the_order_is_a_function_of_seed_and_epoch_for_ever():
    assert Distributed(10, 2, seed=3).order(0).tolist() == [9, 1, 0, 8, 2, 4, 3, 5, 7, 6]
    assert Distributed(10, 2, seed=3).order(1).tolist() == [5, 1, 3, 0, 6, 9, 8, 7, 2, 4]


@given(st.integers(), epochs, st.integers(1, 6))
def test_batch_size_and_ranks_do_not_change_the_order(seed, epoch, batch_size):
    one = Distributed(60, 1, seed=seed).order(epoch)
    other = Distributed(60, batch_size, rank=1, world_size=2, seed=seed).order(epoch)
    assert other.tolist() == one.tolist()[: len(other)]


def test_epochs_and_seeds_differ_and_without_shuffle_nothing_does():
    orders = {tuple(Distributed(50, 5, seed=seed).order(epoch)) for seed in (0, 1, -1, 2**31) for epoch in range(5)}
    assert len(orders) == 20
    assert list(Distributed(50, 5, shuffle=False).order(7)) == list(range(50))


@pytest.mark.parametrize(
    ("n", "batch_size", "drop_last", "full"),
    [(10, 2, True, 8), (10, 2, False, 12), (8, 2, True, 8), (8, 2, False, 8), (3, 2, False, 4), (1, 5, False, 20)],
)
def test_an_epoch_says_how_many_samples_it_visits(n, batch_size, drop_last, full):
    sampler = Distributed(n, batch_size, world_size=4 if batch_size == 5 else 2, drop_last=drop_last)
    assert len(sampler) * sampler.global_batch == full


@pytest.mark.parametrize(
    ("n", "batch_size", "world_size", "drop_last", "words"),
    [
        (7, 4, 2, True, r"7 samples, fewer than one global batch of 8 .*4 x 2 ranks.*data\.batch_size=3 or less"),
        (1, 1, 2, True, r"data\.batch_size=1 or less \(fewer .*\), or sampler\.drop_last=false"),
        (0, 4, 2, False, "got 0 samples"),
        (7, 0, 2, False, r"data\.batch_size=0"),
    ],
)
def test_an_epoch_without_a_step_is_refused_with_what_to_type(n, batch_size, world_size, drop_last, words):
    with pytest.raises(ConfigError, match=words):
        Distributed(n, batch_size, 0, world_size, drop_last=drop_last)
