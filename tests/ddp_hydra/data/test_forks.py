"""A process that is forked from one whose threads are reading reads as well."""

from __future__ import annotations

import gzip
import os
import signal
import threading
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ddp_hydra.data.image_folder import S3ImageFolder
from ddp_hydra.data.parquet_rows import ParquetRows
from ddp_hydra.data.wids import WidsShards
from ddp_hydra.storage import base
from ddp_hydra.storage.local import LocalFolder
from tests.support.tar_server import described, index_of, numbered

LOCK = type(threading.Lock())


def images(folder):
    (folder / "all/a").mkdir(parents=True)
    Image.new("RGB", (8, 8), (1, 2, 3)).save(folder / "all/a/1.png")
    data = S3ImageFolder(f"file://{folder}", "all", max_bad_fraction=0.5, cache_mb=1)
    return lambda: np.asarray(data.__getitems__([0])[0][0]).mean() == 2


def shards(folder):
    (folder / "a.tar").write_bytes(content := numbered(0, 3))
    (folder / "index.json").write_bytes(index_of(described("a.tar", 3, content)))
    data = WidsShards(str(folder / "index.json"))

    def read():
        data.expect([0, 1, 2])
        return [bytes(data[number][".cls"]) for number in range(3)] == [b"0", b"1", b"2"]

    return read


def rows(folder):
    pq.write_table(pa.table({"x": [1.0, 2.0], "y": [0, 1]}), folder / "a.parquet")
    data = ParquetRows(str(folder / "a.parquet"), "y")
    return lambda: float(data[1][0][0]) == 2


def file(folder):
    (folder / "a").write_bytes(b"1")
    store = LocalFolder(str(folder))
    return lambda: bytes(store.get("a")) == b"1"


def in_fork(check):
    if not (pid := os.fork()):
        signal.alarm(60)  # in place of waiting for ever
        os._exit(0 if check() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("reader", [images, shards, rows, file])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_locks_that_are_held_do_not_stop_a_fork(tmp_path, reader, used):
    read = reader(tmp_path)
    if used:
        assert read()
    with ExitStack() as held:
        for item in list(base._process_local.values()):
            for lock in filter(lambda value: isinstance(value, LOCK), vars(item).values()):
                held.enter_context(lock)
        in_fork(read)
    assert read()


def test_a_fork_has_what_its_parent_has_read(tmp_path):
    (tmp_path / "a").mkdir()
    read, read_rows = images(tmp_path / "a"), rows(tmp_path)
    assert read()
    assert read_rows()
    (tmp_path / "a/all/a/1.png").unlink()
    (tmp_path / "a.parquet").unlink()
    in_fork(read)
    in_fork(read_rows)


def test_a_fork_leaves_the_shards_that_its_parent_has_opened(tmp_path):
    """What it kept open would stay on the disk, and there is room for two of three."""
    for number, name in enumerate("abc"):
        (tmp_path / f"{name}.tar.gz").write_bytes(gzip.compress(numbered(3 * number, 3, 100_000)))
    (tmp_path / "index.json").write_bytes(index_of(*(described(f"{name}.tar.gz", 3) for name in "abc")))
    data = WidsShards(str(tmp_path / "index.json"), cache_dir=tmp_path / "cache", cache_gb=800_000 / 2**30)
    assert [bytes(data[number][".cls"]) for number in range(6)] == [b"%d" % number for number in range(6)]
    in_fork(lambda: not data._cache.held and [bytes(data[number][".cls"]) for number in (0, 8)] == [b"0", b"8"])
    data.close()
