from __future__ import annotations

import pytest

from ddp_hydra.data.shards.cache import ShardCache
from tests.support.tar_server import serving


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture
def cache_of(tmp_path):
    """Make caches that are closed after the test."""
    made = []

    def make(shards, budget_bytes=2**30, folder=None, **options) -> ShardCache:
        cache = ShardCache(shards, folder or tmp_path / "cache", budget_bytes, **{"prefetch": 0, **options})
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.close()
