from __future__ import annotations

import pytest

from ddp_hydra.data.samplers import Distributed, Repeated


@pytest.mark.parametrize("n", [1, 2])
def test_the_first_batches_come_again_and_again(n):
    whole = Distributed(10, 2, 0, 1, seed=3)
    few = Repeated(whole, n)
    first = list(whole.batches(0))[:n]
    for epoch in (0, 1):
        assert list(few.batches(epoch)) == [first[step % n] for step in range(5)]
    assert (len(few), few.steps(4), few.global_batch) == (5, 3, 2)
    assert list(few.batches(1, 4)) == list(few.batches(1))[2:]
