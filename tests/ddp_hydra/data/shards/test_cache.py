"""The cache of shards: whole files only, and one download for all processes."""

from __future__ import annotations

import ast
import errno
import fcntl
import gzip
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_hydra.data.shards import cache_folder as shard_folder
from ddp_hydra.data.shards import download as shard_download
from ddp_hydra.data.shards.cache import ShardCache
from ddp_hydra.data.shards.index import Shard
from ddp_hydra.storage import Access
from tests.support.shard_caches import COUNT, files, label, serve, settle, shard_of, wait_until
from tests.support.tar_server import numbered

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[4]


# One whole file


def test_a_shard_is_downloaded_once_and_then_at_hand(server, cache_of, tmp_path):
    shards = serve(server, "ab")
    cache = cache_of(shards)
    assert [label(cache, 1, index) for index in range(3)] == [20, 21, 22]
    assert cache.counts["downloads"] == cache.counts["cache_misses"] == 1
    assert cache.counts["bytes"] == shards[1].size
    assert cache.counts["waited_s"] > 0
    other = cache_of(shards)
    assert label(other, 1) == 20
    assert (other.counts["cache_hits"], other.counts["cache_misses"], server.gets("/b.tar")) == (1, 0, 1)
    assert files(tmp_path / "cache") == ["b.tar", "lock"]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_large_shard_comes_in_pieces_several_at_a_time(server, cache_of, monkeypatch):
    monkeypatch.setattr(shard_download, "PIECE_BYTES", 4000)
    monkeypatch.setattr(shard_download, "CONNECTIONS", 3)
    shards = serve(server, "a", n_bytes=500)
    cache = cache_of(shards)
    server.gate.clear()
    reader = threading.Thread(target=label, args=(cache, 0))
    reader.start()
    wait_until(lambda: server.at_once == 3)
    server.gate.set()
    reader.join()
    assert [label(cache, 0, index) for index in range(COUNT)] == list(range(COUNT))
    assert server.gets("/a.tar") == -(-shards[0].size // 4000) > 3
    assert server.most_at_once == 3


@pytest.mark.parametrize("name", ["a.tar", "a.tgz"])
def test_a_store_that_gives_whole_files_only_is_read_in_one_go(server, cache_of, monkeypatch, caplog, name):
    monkeypatch.setattr(shard_download, "PIECE_BYTES", 4000)
    monkeypatch.setattr(shard_download, "CONNECTIONS", 1)
    paths = [f"/{number}{name}" for number in range(2)]
    for number, path in enumerate(paths):
        tar = numbered(COUNT * number, COUNT, 500)
        server.files[path] = tar if path.endswith(".tar") else gzip.compress(tar, 0)
    server.ranges = False
    cache = cache_of([shard_of(server, path, server.files[path]) for path in paths])
    assert [label(cache, number, 3) for number in range(2)] == [3, COUNT + 3]
    assert server.gets(paths[1]) == 1
    assert caplog.text.count("gives whole files only") == 1


def test_shards_of_this_machine_are_used_where_they_are(cache_of, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(numbered(0, COUNT))
    cache = cache_of([Shard(str(path), COUNT)])
    cache.expect([0])
    assert label(cache, 0, 3) == 3
    cache.note_done(0)
    assert not (tmp_path / "cache").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz"])
@pytest.mark.parametrize("place", ["web", "local"])
def test_a_compressed_shard_is_unpacked_into_the_cache(server, cache_of, tmp_path, name, place):
    plain = numbered(0, COUNT, n_bytes=5000)
    packed = gzip.compress(plain[:7000]) + gzip.compress(plain[7000:]) + b"\0" * 100  # as parallel packers write it
    server.files[f"/{name}"] = packed
    (tmp_path / name).write_bytes(packed)
    shard = shard_of(server, f"/{name}", packed)
    if place == "local":
        shard = Shard(str(tmp_path / name), COUNT, shard.size, shard.md5)
    assert label(cache_of([shard]), 0, 5) == 5
    assert label(cache_of([shard]), 0, 5) == 5
    assert server.gets(f"/{name}") == (place == "web")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_size for path in (tmp_path / "cache").glob("*.tar")] == [len(plain)]


def test_a_compressed_shard_of_this_machine_that_is_written_anew_is_unpacked_anew(cache_of, tmp_path):
    path = tmp_path / "a.tar.gz"
    for start, mtime in ((0, 1), (500, 2)):
        path.write_bytes(gzip.compress(numbered(start, COUNT)))
        os.utime(path, (mtime, mtime))
        assert label(cache_of([Shard(str(path), COUNT)]), 0) == start


def test_a_file_has_a_name_for_each_url_and_version_and_no_secret(server, cache_of, tmp_path):
    server.files |= {"/val/a.tar": numbered(500, COUNT), "/a.tar?token=secret": numbered(60, COUNT)}
    others = [shard_of(server, "/val/a.tar"), Shard(f"{server.url}/a.tar?token=secret", COUNT)]
    (old,) = serve(server, "a")
    cache = cache_of([old, *others])
    assert [label(cache, number) for number in range(3)] == [0, 500, 60]
    assert files(tmp_path / "cache") == ["a.tar", "a.tar", "a.tar", "lock"]
    content = numbered(700, COUNT)
    server.add(a=content)
    assert label(cache_of([shard_of(server, "/a.tar", content)]), 0) == 700


def test_a_bucket_of_another_endpoint_is_another_one(monkeypatch):
    shards, names = [Shard("s3://bucket/a.tar", COUNT)], []
    for endpoint in ("http://one", "http://two"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        names.append(ShardCache(shards)._names[0])
    assert ShardCache(shards, access=Access(endpoint_url="http://one"))._names == names[:1]
    assert len(set(names)) == 2


def test_a_folder_that_is_removed_is_made_again(server, cache_of, tmp_path):
    cache = cache_of(serve(server, "ab"))
    assert label(cache, 0) == 0
    settle(cache)
    shutil.rmtree(tmp_path / "cache")
    assert [label(cache, number) for number in (0, 1)] == [0, COUNT]
    assert files(tmp_path / "cache") == ["b.tar", "lock"]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    cache.note_done(0)
    assert label(cache, 0) == 0


@pytest.mark.parametrize("damaged", [False, True])
def test_a_shard_whose_folder_is_removed_while_it_comes_is_read_without_a_name(server, cache_of, tmp_path, damaged):
    shards = serve(server, "ab")
    cache, other = cache_of(shards), cache_of(shards)
    if damaged:  # it is fetched again, into the same file
        server.spoil = lambda path, content: flipped(path, content) if server.gets(path) == 1 else content
    server.gate.clear()
    with ThreadPoolExecutor() as threads:
        read = threads.submit(label, cache, 0)
        wait_until(lambda: server.at_once == 1)
        shutil.rmtree(tmp_path / "cache")
        server.gate.set()
        assert read.result() == 0
    assert files(tmp_path / "cache") == ["lock"]
    assert label(other, 0) == 0
    assert files(tmp_path / "cache") == ["a.tar", "lock"]


def test_a_folder_that_can_not_be_made_again_is_no_fault_of_a_shard(server, cache_of, tmp_path):
    cache = cache_of(serve(server, "ab"))
    label(cache, 0)
    settle(cache)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").touch()
    with pytest.raises(OSError, match=r"cache on .* can't be made \(File exists\): type data\.cache_dir=") as caught:
        label(cache, 1)
    assert type(caught.value) is OSError
    (tmp_path / "cache").unlink()
    assert label(cache, 1) == COUNT


# What is missing, wrong or damaged


def test_a_missing_shard_leaves_nothing_and_is_there_when_it_comes(server, cache_of, tmp_path):
    shards = [shard_of(server, "/a.tar")]
    cache = cache_of(shards)
    for _ in range(3):  # it is asked for once
        with pytest.raises(FileNotFoundError, match=r"/a\.tar \(404\)"):
            cache.open(0)
    assert server.requests.total() == 1
    assert files(tmp_path / "cache") == []
    server.add(a=numbered(0, COUNT))
    assert label(cache_of(shards), 0) == 0


def flipped(path: str, content: bytes) -> bytes:
    return content[:600] + bytes([content[600] ^ 1]) + content[601:]


def test_an_error_that_can_not_be_copied_is_raised_as_it_is(server, cache_of, monkeypatch):
    class OwnError(ValueError):
        def __init__(self, shard, reason):
            super().__init__(f"{shard}: {reason}")

    def broken(number):
        raise OwnError(number, "broken")

    cache = cache_of([shard_of(server, "/a.tar")])
    monkeypatch.setattr(cache, "_open_cached", broken)
    for _ in range(2):
        with pytest.raises(OwnError, match="0: broken"):
            cache.open(0)


def test_a_wrong_md5_is_tried_again_and_then_refused(server, cache_of, tmp_path):
    shards = serve(server, "ab")
    server.spoil = lambda path, content: flipped(path, content) if server.gets(path) == 1 else content
    assert label(cache_of(shards), 1) == COUNT
    assert server.gets("/b.tar") == 2
    (tmp_path / "cache" / next(path.name for path in (tmp_path / "cache").glob("*.tar"))).unlink()
    server.spoil = flipped
    cache = cache_of(shards)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"a\.tar has the MD5 [0-9a-f]{32}, and the index says"):
            cache.open(0)
    assert server.gets("/a.tar") == 2
    with pytest.raises(ValueError, match=r"a\.tar has [\d,]+ bytes, and the index says 5"):
        cache_of([shard_of(server, "/a.tar", size=5)]).open(0)
    server.files["/a.tgz"] = gzip.compress(random.Random(0).randbytes(3000))[:2000]
    with pytest.raises(ValueError, match=r"a\.tgz can't be decompressed: it ends too early"):
        cache_of([shard_of(server, "/a.tgz")]).open(0)
    assert files(tmp_path / "cache") == ["lock"]


@pytest.mark.parametrize("place", ["web", "local"])
def test_a_shard_with_other_samples_than_the_index_says_is_refused(server, cache_of, tmp_path, place):
    content = numbered(0, COUNT)
    server.add(a=content)
    (tmp_path / "a.tar").write_bytes(content)
    url = f"{server.url}/a.tar" if place == "web" else f"{tmp_path}/a.tar"
    cache = cache_of([Shard(url, 21)])
    for _ in range(3):
        with pytest.raises(ValueError, match=r"a\.tar holds 20 samples, and the index says 21"):
            cache.open(0)
    assert server.gets("/a.tar") == (place == "web")


def cut_off(content: bytes) -> bytes:
    return content[:5000]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("spoil", "index", "downloads"),
    [
        (cut_off, None, 2),
        (cut_off, b"", 2),
        (lambda content: numbered(500, COUNT), None, 2),  # of the same size and names
        (lambda content: content, b"rubbish", 1),
    ],
)
def test_a_file_that_was_spoiled_in_the_cache_is_made_anew(server, cache_of, tmp_path, known, spoil, index, downloads):
    shards = serve(server, "a", known)
    first = cache_of(shards)
    assert label(first, 0) == 0
    settle(first)
    (path,) = (tmp_path / "cache").glob("*.tar")
    path.write_bytes(spoil(path.read_bytes()))
    if index is not None:
        Path(f"{path}.npz").write_bytes(index)
    assert label(cache_of(shards), 0, COUNT - 1) == COUNT - 1
    assert server.gets("/a.tar") == downloads


def test_a_shard_that_a_crash_of_the_machine_may_have_emptied_is_downloaded_again(
    server, cache_of, tmp_path, monkeypatch
):
    shards = serve(server, "ab")
    first = cache_of(shards)
    assert (label(first, 0), label(first, 1)) == (0, COUNT)
    settle(first)
    (path,) = (tmp_path / "cache").glob("*-a.tar.npz")
    path.unlink()  # the last thing that is written
    monkeypatch.setattr(shard_folder, "_booted_at", lambda: time.time() + 1)
    cache = cache_of(shards)
    assert (label(cache, 0), label(cache, 1)) == (0, COUNT)
    assert (server.gets("/a.tar"), server.gets("/b.tar")) == (2, 1)


def test_a_disk_that_becomes_full_amid_a_download_leaves_nothing(server, cache_of, monkeypatch, tmp_path):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_download, "open", full, raising=False)
    with pytest.raises(OSError, match=r"cache on .* became full: free it, or type data\.cache_dir="):
        cache_of(serve(server, "a")).open(0)
    assert files(tmp_path / "cache") == ["lock"]


# Many processes


EIGHT = """
import multiprocessing, pickle, sys
from ddp_hydra.data.shards.cache import ShardCache

def work():
    cache = ShardCache(pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2], prefetch=1)
    barrier.wait()
    cache.expect([0, 1])
    told.put([int(bytes(cache.open(number).fields(0)[".cls"])) for number in range(2)])

context = multiprocessing.get_context("fork")  # of a process that has read nothing yet
barrier, told = context.Barrier(8), context.SimpleQueue()
processes = [context.Process(target=work) for _ in range(8)]
for process in processes:
    process.start()
print([told.get() for process in processes])
for process in processes:
    process.join()
"""


def test_eight_processes_download_a_shard_once_and_end_without_closing_the_cache(server, tmp_path):
    shards = serve(server, "ab")
    server.delay_s = 0.05
    command = [sys.executable, "-c", EIGHT, pickle.dumps(shards).hex(), str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert ast.literal_eval(done.stdout) == 8 * [[0, COUNT]]
    assert (server.gets("/a.tar"), server.gets("/b.tar")) == (1, 1)
    left = [name for name in files(tmp_path / "cache") if not name.endswith(".part")]  # of a thread that ended amid it
    assert left == ["a.tar", "b.tar", "lock"]


@pytest.mark.slow
def test_what_a_killed_process_left_is_never_taken_for_a_shard(server, cache_of, tmp_path):
    shards = serve(server, "a", n_bytes=100_000)
    server.gate.clear()  # half of it is sent
    code = (
        "import pickle, sys\nfrom ddp_hydra.data.shards.cache import ShardCache\n"
        "ShardCache(pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2], prefetch=0).open(0)"
    )
    command = [sys.executable, "-c", code, pickle.dumps(shards).hex(), str(tmp_path / "cache")]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_until(lambda: server.gets("/a.tar"), 60)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    server.gate.set()
    assert files(tmp_path / "cache") == ["a.tar.part", "lock"]
    cache = cache_of(shards)
    assert [label(cache, 0, index) for index in range(COUNT)] == list(range(COUNT))
    assert files(tmp_path / "cache") == ["a.tar", "lock"]


def test_one_waits_for_the_download_of_another(server, cache_of):
    shards = serve(server, "a")
    server.gate.clear()
    caches = [cache_of(shards) for _ in range(3)]
    labels: list[int] = []
    readers = [*caches, *caches]  # threads of one process open a shard once, too
    threads = [threading.Thread(target=lambda cache=cache: labels.append(label(cache, 0, 4))) for cache in readers]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.gets("/a.tar"))
    time.sleep(0.05)
    server.gate.set()
    for thread in threads:
        thread.join()
    assert labels == [4] * 6
    assert server.gets("/a.tar") == 1


def test_it_pickles_at_any_time(server, cache_of):
    shards = serve(server, "ab")
    cache = cache_of(shards)
    again = [pickle.loads(pickle.dumps(cache))]
    label(cache, 0)
    cache.expect([0, 1])
    again.append(pickle.loads(pickle.dumps(cache)))
    for copy in again:
        assert (label(copy, 0), label(copy, 1)) == (0, COUNT)
        copy.close()


def test_a_mapped_shard_stays_locked_until_its_last_part_is_gone(server, cache_of, tmp_path):
    cache = cache_of(serve(server, "a"))
    view = cache.open(0).fields(0)[".cls"]
    cache.close()
    (path,) = (tmp_path / "cache").glob("*.tar")
    with path.open("rb+") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert bytes(view) == b"0"
        del view
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Arguments


@pytest.mark.parametrize(
    ("options", "said"),
    [({"budget_bytes": 0}, r"data\.cache_gb="), ({"prefetch": -1}, r"data\.prefetch_shards=")],
)
def test_arguments_out_of_their_range_are_refused(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        ShardCache([], tmp_path, **options)


def test_the_folder_is_in_the_users_cache_and_one_that_cannot_be_made_is_named(server, cache_of, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    shards = serve(server, "a")
    cache = ShardCache(shards, prefetch=0)
    label(cache, 0)
    cache.close()
    assert files(tmp_path / "xdg" / "ddp_hydra" / "shards") == ["a.tar", "lock"]
    with pytest.raises(OSError, match=rf"{tmp_path}/file/x on .* can't be made .*type data\.cache_dir="):
        cache_of(shards, folder=tmp_path / "file" / "x").open(0)
