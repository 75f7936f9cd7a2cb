from __future__ import annotations

import gc

from ddp_hydra.rank import garbage


def test_it_is_searched_for_again_only_after_a_pause():
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    garbage.resume()
    # Threads of other tests may let permanent objects go meanwhile, so the count may fall.
    assert gc.get_freeze_count() <= frozen
    new = [[] for _ in range(10_000)]
    garbage.pause()
    try:
        assert not gc.isenabled()
    finally:
        garbage.resume()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(new) / 2
