"""Files of web servers that do not say how long an answer is, or give no parts of a file."""

from __future__ import annotations

import http.server
import multiprocessing
import threading
from contextlib import contextmanager
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddp_hydra.data.parquet_rows import ParquetRows
from ddp_hydra.data.wids import WidsShards
from ddp_hydra.storage.object_store import WebServer
from tests.support.tar_server import described, index_of, numbered

CONTENT = bytes(range(256)) * 50
PLAIN = http.server.SimpleHTTPRequestHandler


class Quiet(PLAIN):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Chunked(Quiet):
    """Sends pieces, as proxies and programs do."""

    protocol_version = "HTTP/1.1"

    def send_header(self, keyword: str, value: str) -> None:
        super().send_header(*(("Transfer-Encoding", "chunked") if keyword == "Content-Length" else (keyword, value)))

    def copyfile(self, source, outputfile) -> None:
        while piece := source.read(1000):
            outputfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        outputfile.write(b"0\r\n\r\n")

    def send_error(self, code, *_: object, **__: object) -> None:
        self.send_response(code)
        super().send_header("Content-Length", "0")
        self.end_headers()


class UntilClosed(Quiet):
    """Ends an answer by closing the connection, and knows no HEAD."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Content-Length":
            super().send_header(keyword, value)

    def do_HEAD(self) -> None:  # noqa: N802
        self.send_response(405)
        self.end_headers()


@contextmanager
def serving(kind, folder):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(params=[Quiet, Chunked, UntilClosed], ids=lambda kind: kind.__name__)
def url(request, tmp_path):
    (tmp_path / "a b#ü.bin").write_bytes(CONTENT)
    (tmp_path / "a.tar").write_bytes(shard := numbered(0, 3))
    (tmp_path / "index.json").write_bytes(index_of(described("a.tar", 3, shard)))
    table = pa.table({"x": [float(number) for number in range(40)], "y": list(range(40))})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=10)
    with serving(request.param, tmp_path) as found:
        yield found


def test_files_are_read_whole(url):
    store = WebServer(url, retry_timeout_s=5)
    assert store.size("a b#ü.bin") == len(CONTENT)
    for size in (None, len(CONTENT)):
        assert bytes(store.get("a b#ü.bin", size)) == CONTENT
    assert b"".join(map(bytes, store.stream("a b#ü.bin", len(CONTENT), 0))) == CONTENT
    assert b"".join(map(bytes, store.stream("a b#ü.bin", len(CONTENT), 100))) == CONTENT[100:]
    with pytest.raises(FileNotFoundError, match=r"there is no http://127.*/none\.bin \(404\)"):
        store.get("none.bin")


def test_rows_of_parquet_files_are_read(url):
    data = ParquetRows(f"{url}/rows.parquet", "y")
    assert data[13][0].item() == 13
    assert [int(y) for _, y in data.__getitems__([39, 0, 25])] == [39, 0, 25]


def test_shards_are_read_also_in_a_fork(url, tmp_path):
    data = WidsShards(f"{url}/index.json", cache_dir=tmp_path / "cache")
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    process = context.Process(target=lambda: told.put([bytes(data[number][".cls"]) for number in range(3)]))
    process.start()
    assert told.get() == [b"0", b"1", b"2"]
    process.join()
    data.close()
