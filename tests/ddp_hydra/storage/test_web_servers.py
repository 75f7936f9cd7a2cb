"""Files of web servers that tell no lengths, give no parts of a file, refuse HEAD, or lead elsewhere."""

from __future__ import annotations

import gzip
import http.server
import io
import multiprocessing
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddp_hydra.data.image_table import ImageTable
from ddp_hydra.data.parquet_rows import ParquetRows
from ddp_hydra.data.wids import WidsShards
from ddp_hydra.storage.object_store import WebServer, is_here
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


class Ranges(Quiet):
    """Gives parts of a file. A subclass says what it refuses."""

    total = True

    def send_head(self):
        asked = self.headers.get("Range")
        file = super().send_head() if asked is None else None
        if asked is None:
            return file
        content = Path(self.translate_path(self.path)).read_bytes()
        start, end = map(int, asked.removeprefix("bytes=").split("-"))
        if start >= len(content):
            self.send_error(416)
            return None
        part = content[start : end + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header(
            "Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(content) if self.total else '*'}"
        )
        self.end_headers()
        return io.BytesIO(part)


class SignedForGet(Ranges):
    """Refuses HEAD, as a store does for a URL that is signed for GET."""

    def do_HEAD(self) -> None:  # noqa: N802
        self.send_error(403)


class WithoutTotal(Ranges):
    """Gives parts, and does not say of how large a file."""

    total = False


class Encoded(Ranges):
    """Sends what is stored as gzip, and says so, asked or not."""

    def end_headers(self) -> None:
        self.send_header("Content-Encoding", "gzip")
        super().end_headers()

    def send_head(self):
        path = Path(self.translate_path(self.path))
        if path.is_file() and (content := path.read_bytes())[:2] != b"\x1f\x8b":
            path.write_bytes(gzip.compress(content))
        return super().send_head()


class EncodedForGet(Encoded):
    do_HEAD = SignedForGet.do_HEAD  # noqa: N815


class EncodedUntilClosed(Encoded, UntilClosed):
    pass


class NotForYou(SignedForGet):
    do_GET = SignedForGet.do_HEAD  # noqa: N815


class Elsewhere(Quiet):
    """Leads to another host, which is this machine by another name."""

    to = ""

    def send_head(self):
        self.send_response(302)
        self.send_header("Location", self.to + self.path)
        self.send_header("Content-Length", "0")
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


KINDS = [Quiet, Chunked, UntilClosed, SignedForGet, WithoutTotal, Encoded, EncodedForGet, EncodedUntilClosed]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def url(request, tmp_path):
    (tmp_path / "a b#ü.bin").write_bytes(CONTENT)
    (tmp_path / "empty").touch()
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
    assert (store.size("empty"), bytes(store.get("empty"))) == (0, b"")
    with pytest.raises(FileNotFoundError, match=r"there is no http://127.*/none\.bin \(404\)"):
        store.get("none.bin")


def test_the_size_of_a_file_that_is_signed_for_get_is_asked_without_reading_it(tmp_path):
    (tmp_path / "a.bin").write_bytes(CONTENT)
    with serving(SignedForGet, tmp_path) as url:
        store = WebServer(f"{url}/?signature=1", retry_timeout_s=0)
        store._download = None  # what would read it whole
        assert store.size("a.bin") == len(CONTENT)
        assert bytes(store.get_range("a.bin", 3, 5)) == CONTENT[3:5]
    with serving(NotForYou, tmp_path) as url, pytest.raises(PermissionError, match=r"a\.bin may not be read \(403\)"):
        WebServer(url, retry_timeout_s=0).size("a.bin")


@pytest.mark.parametrize("kind", [Quiet, UntilClosed])
def test_no_proxy_is_used_where_a_server_of_this_machine_leads_to_another_host(kind, tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(CONTENT)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with serving(kind, tmp_path) as there:
        leading = type("Leading", (Elsewhere,), {"to": there.replace("127.0.0.1", "localhost")})
        with serving(leading, tmp_path) as url:
            store = WebServer(url, retry_timeout_s=0)
            assert (store.size("a.bin"), bytes(store.get("a.bin"))) == (len(CONTENT), CONTENT)


def test_rows_of_parquet_files_are_read(url):
    data = ParquetRows(f"{url}/rows.parquet", "y")
    assert data[13][0].item() == 13
    assert [int(y) for _, y in data.__getitems__([39, 0, 25])] == [39, 0, 25]


def test_the_query_of_a_url_is_no_part_of_a_files_name(tmp_path, png):
    table = pa.table({"path": ["1.png", "1.png"], "label": [0, 1], "x": [1.0, 2.0]})
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "1.png").write_bytes(png())
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"path,label\n1.png,0\n1.png,1\n"))
    (tmp_path / "download").write_bytes((tmp_path / "rows.parquet").read_bytes())
    with serving(Quiet, tmp_path) as url:
        for name in ("rows.parquet?download=true", "rows.parquet?signature=a/b/", "download?name=rows.parquet"):
            assert len(ParquetRows(f"{url}/{name}", "label", ["x"])) == 2
        for name in ("rows.parquet?a=b/c", "rows.csv.gz?a=b/c"):
            assert len(list(ImageTable(f"{url}/{name}", max_bad_fraction=0))) == 2
        with pytest.raises(FileNotFoundError, match=r"there is no file .*/none\.parquet: check data\.files"):
            ParquetRows(f"{url}/none.parquet?a=1", "label")
        with pytest.raises(ValueError, match=r"rows\.csv is not a Parquet file: type python .*'rows\.parquet'"):
            ParquetRows(f"{url}/rows.csv?a=1", "label")
        with pytest.raises(ValueError, match=r"can't be listed"):
            ParquetRows(f"{url}/rows/", "label")


def test_shards_are_read_also_in_a_fork(url, tmp_path):
    data = WidsShards(f"{url}/index.json", cache_dir=tmp_path / "cache")
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    process = context.Process(target=lambda: told.put([bytes(data[number][".cls"]) for number in range(3)]))
    process.start()
    assert told.get() == [b"0", b"1", b"2"]
    process.join()
    data.close()


def test_an_archive_that_is_sent_as_encoded_is_the_archive(tmp_path):
    (tmp_path / "rows.csv.gz").write_bytes(content := gzip.compress(b"path,label\n1.png,0\n"))
    (tmp_path / "rows.csv").write_bytes(content[:-4])
    with serving(Encoded, tmp_path) as url:
        store = WebServer(url, retry_timeout_s=0)
        assert (store.size("rows.csv.gz"), bytes(store.get("rows.csv.gz"))) == (len(content), content)
        with pytest.raises(ConnectionError, match=r"Content-Encoding: gzip is damaged"):
            store.get("rows.csv")


def test_names_of_this_machine_are_known():
    here = ("localhost", "localhost.localdomain:9000", "LOCALHOST:9000", "127.0.0.1", "127.9.1.2:80", "[::1]:9000")
    assert all(is_here(f"http://{host}/file") for host in here)
    assert not any(
        is_here(f"http://{host}/file") for host in ("localhosts.org", "12.7.0.1", "a.localhost.org", "[::2]")
    )
