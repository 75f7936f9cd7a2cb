from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ddp_hydra.config.rank_batch import RankBatch, asked, describe_change, redistribute, settle
from ddp_hydra.errors import ConfigError


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


def config(size=8, total=None, micro_batches=1, static=None):
    parallel = {} if static is None else {"static_graph": static}
    data = {"batch_size": size, "global_batch": total}
    return OmegaConf.create(
        {"data": data, "trainer": {"gradient_accumulation_steps": micro_batches}, "parallel": parallel}
    )


def settled(cfg, *arguments):
    batch, said = settle(cfg, *arguments)
    return RankBatch(cfg.data.batch_size, cfg.trainer.gradient_accumulation_steps), {"batch": batch}, said


@pytest.mark.parametrize(
    ("ranks", "static", "given_up"), [(2, True, True), (4, True, False), (2, False, False), (2, None, False)]
)
def test_a_static_graph_is_given_up_where_fewer_ranks_bring_micro_batches(ranks, static, given_up):
    cfg = config(static=static)
    settled(cfg, {}, ranks, 4)
    kept = {} if static is None else {"static_graph": static}
    assert cfg.parallel == ({"static_graph": False, "find_unused_parameters": True} if given_up else kept)


def test_a_global_batch_is_divided_among_ranks_and_micro_batches_or_refused():
    assert asked(config(total=64), 4) == RankBatch(16, 1)
    assert asked(config(total=64, micro_batches=2), 4) == RankBatch(8, 2)
    with pytest.raises(
        ConfigError, match=r"data\.global_batch=64 does not divide among 3 ranks: give a multiple of 3, as 63"
    ):
        asked(config(total=64), 3)
    with pytest.raises(ConfigError, match="3 ranks x 2 micro-batches: give a multiple of 6, as 6"):
        asked(config(total=2, micro_batches=2), 3)


@pytest.mark.parametrize("first", [{"size": 8}, {"total": 32}])
def test_a_resume_keeps_the_global_batch_unless_another_one_is_asked_for(first):
    shared, saved, said = settled(config(**first), {}, 4, 4)
    assert (shared, said) == (RankBatch(8, 1), "")
    shared, again, said = settled(config(**first), saved, 2, 2)
    assert (shared, again, "2 ranks instead of 4: the global batch stays 32" in said) == (RankBatch(8, 2), saved, True)
    assert settled(config(**first), again, 4, 4) == (RankBatch(8, 1), saved, "")
    assert settled(config(total=96), saved, 3, 3)[::2] == (RankBatch(32, 1), "")
    assert settled(config(size=5), saved, 2, 2)[::2] == (RankBatch(5, 1), "")


@pytest.mark.parametrize(
    ("first", "then", "shared"), [({"total": 32}, {"size": 8}, (8, 1)), ({"size": 8}, {"total": 32}, (16, 1))]
)
def test_a_resume_that_types_the_other_one_of_the_two_keys_has_its_batch(first, then, shared):
    before = config(**first)
    kept = OmegaConf.to_container(before)
    saved = settled(before, {}, 4, 4)[1] | {"config": kept}
    assert settled(config(**then), saved, 2, 2)[::2] == (RankBatch(*shared), "")
    assert settled(config(**first), saved, 2, 2)[0] == RankBatch(8, 2)


def test_a_resume_has_the_batch_of_a_variable_that_the_config_reads(monkeypatch):
    monkeypatch.setenv("BATCH", "8")
    _, saved, _ = settled(config("${oc.decode:${oc.env:BATCH}}"), {}, 4, 4)
    monkeypatch.setenv("BATCH", "16")
    assert settled(config("${oc.decode:${oc.env:BATCH}}"), saved, 4, 4)[::2] == (RankBatch(16, 1), "")


def test_a_restart_before_the_first_checkpoint_has_the_global_batch_of_the_first_attempt():
    assert settled(config(), {}, 1, 4)[0] == RankBatch(8, 4)
    shared, saved, said = settled(config(), {}, 3, 4)
    assert (shared, "so it is 24 now" in said) == (RankBatch(8, 1), True)
    assert settled(config(), saved, 2, 4)[0] == RankBatch(8, 2)
