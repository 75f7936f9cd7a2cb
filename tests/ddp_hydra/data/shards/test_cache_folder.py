"""The folder that processes share."""

import fcntl
import os
import threading
import time

import pytest

from ddp_hydra.data.shards import cache_folder as module
from ddp_hydra.data.shards.cache_folder import ShardFolder, with_index
from tests.support.shard_caches import files

NAME = f"{'0' * 32}-a.tar"
OTHER = f"{'1' * 32}-b.tar"
SIZE = 1000


@pytest.mark.medium
def test_a_shard_that_gets_its_name_while_it_is_counted_is_counted(tmp_path, monkeypatch):
    """The budget would be exceeded: a name is listed, the file has another one when its size is asked for."""
    folder = ShardFolder(tmp_path, with_index(SIZE))
    part, other = folder.claim(NAME), folder.claim(OTHER)
    assert folder.reserve(part, SIZE, {NAME, OTHER}, {}, evict_needed=False) is None
    publisher = threading.Thread(target=folder.publish, args=(part, NAME))
    listed = os.scandir

    class Slow:
        """A listing that takes so long that the other would have done it by then."""

        def __init__(self, path):
            self.entries = list(listed(path))

        def __enter__(self):
            publisher.start()
            publisher.join(0.3)
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(module.os, "scandir", Slow)
    try:
        assert folder.reserve(other, SIZE, {NAME, OTHER}, {}, evict_needed=False) == "all shards in it are in use"
    finally:
        publisher.join()
        os.close(part)
        os.close(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("owner", ["me", "other"])
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_who_shares_a_folder_with_others_has_a_part_that_only_they_write_to(tmp_path, owner, mode):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    os.chown(shared, 0 if owner == "me" else 12345, -1)
    own = owner == "me" and mode == 0o755
    found = ShardFolder(shared, SIZE).path
    assert found == (shared if own else shared / "user-0")
    if own:
        return
    assert found.stat().st_mode & 0o777 == 0o700
    assert ShardFolder(shared, SIZE).path == found
    os.chown(found, 12345, -1)  # who was first
    with pytest.raises(OSError, match=r"shared/user-0 is another user's"):
        ShardFolder(shared, SIZE)
    found.rmdir()
    found.symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"shared/user-0 is another user's"):
        ShardFolder(shared, SIZE)


def test_a_claim_is_for_one_only_and_survives_no_death(tmp_path):
    folder = ShardFolder(tmp_path, 2**20)
    first = folder.claim(NAME)
    assert first is not None
    assert folder.claim(NAME) is None
    os.close(first)  # as the kernel does for a process that dies
    second = folder.claim(NAME)
    assert second is not None
    folder.publish(second, NAME)
    assert folder.claim(NAME) is None
    assert files(tmp_path) == ["a.tar", "lock"]
    descriptor = folder.open(NAME)
    assert descriptor is not None
    with pytest.raises(BlockingIOError), (tmp_path / NAME).open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    os.close(second)


def test_claims_in_a_row_do_not_overlap(tmp_path):
    """Many threads claim and abandon one name: never are two inside."""
    folder = ShardFolder(tmp_path, 2**20)
    inside, most, entered = 0, 0, 0
    lock = threading.Lock()

    def contend() -> None:
        nonlocal inside, most, entered
        for _ in range(100):
            part = folder.claim(NAME)
            if part is None:
                continue
            with lock:
                inside, entered = inside + 1, entered + 1
                most = max(most, inside)
            time.sleep(0.0002)
            with lock:
                inside -= 1
            folder.abandon(part, NAME)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert entered > 0


@pytest.mark.slow
def test_a_download_that_just_begins_is_not_taken_for_what_a_dead_process_left(tmp_path):
    folder = ShardFolder(tmp_path, 2**30)
    done = threading.Event()

    def scan() -> None:
        while not done.is_set():
            folder._scan()

    scanners = [threading.Thread(target=scan) for _ in range(3)]
    for scanner in scanners:
        scanner.start()
    try:
        claimed = 0
        while claimed < 1500:
            if (part := folder.claim(NAME)) is None:
                continue
            claimed += 1
            os.write(part, b"x")
            folder.publish(part, NAME)
            folder.discard(part, NAME)
            os.close(part)
    finally:
        done.set()
        for scanner in scanners:
            scanner.join()


def test_a_process_that_was_forked_while_files_were_locked_keeps_no_lock(tmp_path, monkeypatch):
    folder = ShardFolder(tmp_path, 10 * with_index(SIZE))
    os.close(published(folder))
    real, copies = os.open, []

    def open_(*arguments, **options) -> int:
        descriptor = real(*arguments, **options)
        copies.append(os.dup(descriptor))  # a fork copies it like this
        return descriptor

    monkeypatch.setattr(os, "open", open_)
    part = folder.claim(OTHER)
    assert folder.reserve(part, 10**9, {NAME, OTHER}, {}, evict_needed=True) == "all shards in it are in use"
    monkeypatch.undo()
    for name in ("lock", NAME):
        descriptor = os.open(tmp_path / name, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    for descriptor in (part, *copies):
        os.close(descriptor)


def published(folder: ShardFolder) -> int:
    """Put a shard into the folder; return its descriptor."""
    part = folder.claim(NAME)
    folder.reserve(part, SIZE, {NAME}, {}, evict_needed=False)
    folder.publish(part, NAME)
    return part
