"""The space of the cache of shards: it is bounded, and what is needed again stays."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddp_hydra.data.shards import cache as cache_module
from ddp_hydra.data.shards.cache_folder import CacheEntry, eviction_rank
from tests.support.shard_caches import COUNT, SIZE, files, label, serve, settle, total, wait_until

pytestmark = pytest.mark.integration


# A bounded size


def test_the_cache_never_takes_more_than_it_may(server, cache_of, tmp_path):
    shards = serve(server, "abcdefgh")
    cache = cache_of(shards, 3 * SIZE)
    for number in (*range(8), *range(8)):
        assert label(cache, number) == number * COUNT
        assert total(tmp_path / "cache") <= 3 * SIZE
    assert len(list((tmp_path / "cache").glob("*.tar"))) >= 2


def test_what_is_in_use_is_not_evicted(server, cache_of, monkeypatch, tmp_path):
    monkeypatch.setattr(cache_module, "WAIT_S", 0.2)
    shards = serve(server, "abc")
    cache = cache_of(shards, 2 * SIZE)
    views = [cache.open(number).fields(0)[".cls"] for number in (0, 1)]
    with pytest.raises(OSError, match=r"no space for .* all shards in it are in use.*data\.cache_gb=1") as caught:
        cache.open(2)
    assert "data.cache_dir=" in str(caught.value)
    assert [int(bytes(view)) for view in views] == [0, COUNT]
    del views
    assert label(cache, 2) == 2 * COUNT
    assert total(tmp_path / "cache") <= 2 * SIZE


def test_those_who_wait_for_one_shard_wait_for_its_space_together(server, cache_of, monkeypatch):
    cache, waits, asked = cache_of(serve(server, "a")), [], []
    monkeypatch.setattr(cache._prefetcher, "note_started", asked.append)

    def refuse(*_) -> None:
        waits.append(threading.get_ident())
        wait_until(lambda: len(asked) >= 4)
        raise OSError("no space")

    monkeypatch.setattr(cache, "_reserve", refuse)
    with ThreadPoolExecutor(4) as threads:
        told = [threads.submit(cache.open, 0) for _ in range(4)]
    assert [str(one.exception()) for one in told] == ["no space"] * 4
    assert len(waits) == 1
    with pytest.raises(OSError, match="no space"):  # and who comes later tries again
        cache.open(0)
    assert len(waits) == 2


def test_a_shard_is_evicted_while_its_index_is_being_saved(server, cache_of, monkeypatch, tmp_path):
    monkeypatch.setattr(cache_module, "WAIT_S", 0.2)
    disk = threading.Event()
    monkeypatch.setattr(cache_module.os, "fsync", lambda descriptor: disk.wait(60))
    cache = cache_of(serve(server, "abc"), 2 * SIZE)
    for number in range(3):
        assert label(cache, number) == number * COUNT
        cache.note_done(number)
    assert files(tmp_path / "cache") == ["a.tar", "c.tar", "lock"]
    disk.set()
    settle(cache)
    saved = sorted(path.name[33:] for path in (tmp_path / "cache").glob("*.npz"))
    assert saved == ["a.tar.npz", "c.tar.npz"]


@pytest.mark.parametrize("expected", [False, True])
def test_other_processes_are_asked_to_close_the_shards_that_they_keep_open(server, cache_of, expected):
    shards = serve(server, "abc")
    cache, other = cache_of(shards, 2 * SIZE), cache_of(shards, 2 * SIZE)
    if expected:  # also where they will read on
        other.expect([0, 1])
    label(other, 0)
    label(other, 1)
    assert label(cache, 2) == 2 * COUNT
    assert len(other.held) <= 1
    assert [label(other, number) for number in (0, 1)] == [0, COUNT]


def test_a_shard_larger_than_the_cache_is_refused_at_once(server, cache_of, tmp_path):
    (shard,) = serve(server, "a", n_bytes=1000)
    with pytest.raises(OSError, match=r"a shard takes .* GiB, more than the cache: type data\.cache_gb=1"):
        cache_of([shard], shard.size + 100).open(0)
    assert server.gets("/a.tar") == 0
    assert files(tmp_path / "cache") == []


def test_on_a_full_disk_older_shards_go_and_without_any_it_is_told_apart(server, cache_of, monkeypatch, tmp_path):
    cache = cache_of(serve(server, "ab"))
    label(cache, 0)
    monkeypatch.setattr(cache_module, "_ASK_AFTER_S", 60)
    real, is_full = os.fstatvfs, False

    def full(descriptor):
        free = 0 if is_full or list((tmp_path / "cache").glob("*-a.tar")) else 2**20
        return os.statvfs_result([*real(descriptor)[:4], free, *real(descriptor)[5:]])

    monkeypatch.setattr(os, "fstatvfs", full)
    assert label(cache, 1) == COUNT
    assert files(tmp_path / "cache") == ["b.tar", "lock"]
    is_full = True
    monkeypatch.setattr(cache_module, "WAIT_S", 0.1)
    with pytest.raises(OSError, match=r"the disk is full\. Free it, or type data\.cache_dir="):
        cache_of(serve(server, "c"), folder=tmp_path / "other").open(0)


def test_files_of_others_are_neither_counted_nor_removed(server, cache_of, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    for name in ("holiday.tar", "notes.part", f"{'0' * 32}.tar", f"{'a' * 32}-x.tar.bak"):
        (folder / name).write_bytes(b"x" * 10 * SIZE)
    cache = cache_of(serve(server, "abc"), 2 * SIZE)
    for number in range(3):
        label(cache, number)
    settle(cache)
    assert {"holiday.tar", "notes.part"} <= {path.name for path in folder.iterdir()}
    assert sum(path.stat().st_size == 10 * SIZE for path in folder.iterdir()) == 4


def test_the_leftovers_of_killed_processes_go_when_space_is_needed(server, cache_of, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    old = f"{'0' * 32}-old.tar"
    for name in (f"{old}.part", f"{old}.npz", f"{old}.npz.abc.part"):
        (folder / name).write_bytes(b"x" * SIZE)
    label(cache_of(serve(server, "a")), 0)
    assert files(folder) == ["a.tar", "lock"]


# What is evicted first


def test_the_order_of_eviction():
    def kept(name: str, used: int, read: bool = True) -> CacheEntry:
        return CacheEntry(name, 1, used, used if read else 0)

    index = {"early", "late", "near", "far", "prefetched", "for others"}
    needed = {"near": 3, "far": 9, "prefetched": 2}
    expected = [
        kept("other index, old", 1), kept("other index, new", 90), kept("late", 80), kept("early", 20), kept("far", 10),
        kept("near", 50), kept("prefetched", 70, read=False), kept("for others", 60, read=False),
    ]  # fmt: skip
    shuffled = random.Random(0).sample(expected, len(expected))
    assert sorted(shuffled, key=lambda file: eviction_rank(file, index, needed)) == expected


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_cache_of_half_the_data_saves_half_of_the_downloads(server, cache_of, prefetch):
    shards = serve(server, "abcdefghijkl")
    cache = cache_of(shards, 6 * SIZE, prefetch=prefetch)
    chance = random.Random(0)
    for epoch in range(4):
        order = chance.sample(range(12), 12)
        cache.expect(order)
        for number in order:
            assert label(cache, number) == number * COUNT
            cache.note_done(number)
        if epoch == 0:
            first = cache.counts["downloads"]
    assert first == 12
    # 18 to 21 of 36: it hangs on the clock of the file system, and on which thread asks for space first.
    assert cache.counts["downloads"] - first <= 0.65 * 3 * 12
