from __future__ import annotations

import gc

import pytest

from ddp_hydra import forked


@pytest.mark.medium
def test_it_is_searched_for_again_only_after_a_pause():
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    forked.resume_garbage()
    # Threads of other tests may let permanent objects go meanwhile, so the count may fall.
    assert gc.get_freeze_count() <= frozen
    new = [[] for _ in range(10_000)]
    gc.disable()
    try:
        assert not gc.isenabled()
    finally:
        forked.resume_garbage()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(new) / 2
