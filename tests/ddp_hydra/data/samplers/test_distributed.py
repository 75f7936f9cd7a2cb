from __future__ import annotations

import pytest

from ddp_hydra.data.samplers import Distributed, Repeated
from ddp_hydra.errors import ConfigError


def test_the_order_is_a_function_of_seed_and_epoch_for_ever():
    assert Distributed(10, 2, seed=3).order(0).tolist() == [9, 1, 0, 8, 2, 4, 3, 5, 7, 6]
    assert Distributed(10, 2, seed=3).order(1).tolist() == [5, 1, 3, 0, 6, 9, 8, 7, 2, 4]


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
        (1, 4, 2, True, r"1 sample, .* give dispatch\.ranks=1 or less with data\.batch_size=1, or sampler\."),
        (1, 4, 1, True, r"\(4 x 1 rank\).* give data\.batch_size=1 or less \(times .*\), or sampler\.drop_last=false$"),
        (0, 4, 2, False, "got 0 samples"),
        (7, 0, 2, False, r"data\.batch_size=0"),
    ],
)
def test_an_epoch_without_a_step_is_refused_with_what_to_type(n, batch_size, world_size, drop_last, words):
    with pytest.raises(ConfigError, match=words):
        Distributed(n, batch_size, 0, world_size, drop_last=drop_last)


@pytest.mark.parametrize("n", [1, 2])
def test_the_first_batches_come_again_and_again(n):
    whole = Distributed(10, 2, 0, 1, seed=3)
    few = Repeated(whole, n)
    first = list(whole.batches(0))[:n]
    for epoch in (0, 1):
        assert list(few.batches(epoch)) == [first[step % n] for step in range(5)]
    assert (len(few), few.steps(4), few.global_batch) == (5, 3, 2)
    assert list(few.batches(1, 4)) == list(few.batches(1))[2:]
