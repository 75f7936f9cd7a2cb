from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.job.job_config import RankBatch, changed_settings, describe_change, redistribute


@pytest.mark.parametrize(
    ("batch", "before", "now", "shared", "words"),
    [
        (
            (8, 1), 4, 2, (8, 2),
            "2 ranks instead of 4: the global batch stays 32, with data.batch_size=8 "
            "trainer.gradient_accumulation_steps=2",
        ),
        ((8, 1), 4, 1, (8, 4), "trainer.gradient_accumulation_steps=4"),
        ((8, 2), 2, 4, (8, 1), "trainer.gradient_accumulation_steps=1"),
        ((8, 1), 2, 4, (4, 1), "the global batch stays 16, with data.batch_size=4 "),
        ((6, 1), 8, 6, (4, 2), "data.batch_size=4 trainer.gradient_accumulation_steps=2"),
        ((6, 3), 4, 3, (6, 4), "trainer.gradient_accumulation_steps=4"),
        ((9, 1), 11, 9, (11, 1), "data.batch_size=11 "),
        (
            (8, 1), 4, 3, (8, 1),
            "3 ranks instead of 4: a global batch of 32 does not divide among them, so it is 24 now, with "
            "data.batch_size=8 ",
        ),
        ((8, 2), 4, 3, (8, 2), "so it is 48 now, with data.batch_size=8 trainer.gradient_accumulation_steps=2"),
        ((8, 1), 1, 16, (8, 1), "a global batch of 8 does not divide among them"),
    ],
)  # fmt: skip
def test_a_global_batch_is_shared_out_with_more_parts_before_larger_ones(batch, before, now, shared, words):
    batch, shared = RankBatch(*batch), RankBatch(*shared)
    assert redistribute(batch, before, now) == shared
    assert words in describe_change(batch, before, shared, now)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 32), st.integers(1, 32))
def test_the_global_batch_stays_wherever_it_divides_and_comes_back_with_the_ranks(size, micro_batches, before, now):
    batch = RankBatch(size, micro_batches)
    shared = redistribute(batch, before, now)
    if batch.global_size(before) % now == 0:
        assert shared.global_size(now) == batch.global_size(before)
        assert shared.size <= size or shared.micro_batches == 1
    else:
        assert shared == batch
    assert redistribute(batch, before, before) == batch


@pytest.mark.parametrize(
    ("micro_batches", "static", "given_up"), [(2, True, True), (1, True, False), (2, False, False), (2, None, False)]
)
def test_a_static_graph_is_given_up_where_fewer_ranks_bring_micro_batches(micro_batches, static, given_up):
    config = {"parallel": {} if static is None else {"static_graph": static}}
    settings = changed_settings(RankBatch(8, micro_batches), config)
    batch = {"data.batch_size": 8, "trainer.gradient_accumulation_steps": micro_batches}
    switches = {"parallel.static_graph": False, "parallel.find_unused_parameters": True}
    assert settings == batch | (switches if given_up else {})
