"""Shards are downloaded before they are needed."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.shard_caches import COUNT, SIZE, label, serve, shard_of, total, wait_until

pytestmark = pytest.mark.integration


def test_expected_shards_are_there_before_they_are_needed(server, cache_of, tmp_path):
    shards = serve(server, "abcdefgh")
    cache = cache_of(shards, prefetch=2)
    cache.expect([5, 3, 1, 0])
    wait_until(lambda: len(list((tmp_path / "cache").glob("*.tar"))) == 2)
    time.sleep(0.1)
    assert sorted(path for _, path in server.requests) == ["/d.tar", "/d.tar", "/f.tar", "/f.tar"]
    assert label(cache, 5) == 5 * COUNT
    wait_until(lambda: cache.counts["downloads"] == 3)
    for number in (3, 1, 0):
        label(cache, number)
    assert (cache.counts["downloads"], server.gets("/b.tar"), server.gets("/c.tar")) == (4, 1, 0)


def test_nothing_is_fetched_ahead_beyond_what_the_cache_may_take(server, cache_of, tmp_path):
    shards = serve(server, "abcdef")
    cache = cache_of(shards, 2 * SIZE, prefetch=4)
    cache.expect(range(6))
    wait_until(lambda: len(list((tmp_path / "cache").glob("*.tar"))) == 2)
    time.sleep(0.3)
    assert total(tmp_path / "cache") <= 2 * SIZE
    for number in range(6):
        assert label(cache, number) == number * COUNT
        assert total(tmp_path / "cache") <= 2 * SIZE
        cache.note_done(number)
    assert cache.counts["downloads"] <= 9  # six, but for one that went unread to make room for another


def test_what_fails_ahead_of_time_is_said_when_it_is_needed(server, cache_of):
    shards = [*serve(server, "a"), shard_of(server, "/none.tar")]
    cache = cache_of(shards, prefetch=2)
    cache.expect([0, 1])
    wait_until(lambda: server.requests["HEAD", "/none.tar"] == 1)
    assert label(cache, 0) == 0
    with pytest.raises(FileNotFoundError, match=r"none\.tar"):
        cache.open(1)


def test_close_ends_downloads_that_are_under_way(server, cache_of, tmp_path):
    before = set(threading.enumerate())
    cache = cache_of(serve(server, "ab"), prefetch=2)
    server.gate.clear()
    cache.expect([0, 1])
    wait_until(lambda: server.gets("/a.tar") and server.gets("/b.tar"))
    threading.Timer(0.1, server.gate.set).start()
    cache.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "shard-prefetch"]
    assert not list((tmp_path / "cache").glob("*.part"))
