"""Tar shards for the tests, and a web server that serves them, well or badly."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Files = Iterable[tuple[str, bytes]]


def tar_of(files: Files, **options: Any) -> bytes:
    """The bytes of a tar file with these members."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", **options) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def numbered(start: int, count: int, n_bytes: int = 50) -> bytes:
    """A tar file with samples that know their number."""
    samples = range(start, start + count)
    return tar_of(
        file
        for number in samples
        for file in (
            (f"{number:06d}.cls", str(number).encode()),
            (f"{number:06d}.bin", bytes([number % 256]) * n_bytes),
        )
    )


def described(url: str, n_samples: int, content: bytes | None = None) -> dict[str, Any]:
    """What an index says of a shard, with size and MD5 where the content is given."""
    more = {} if content is None else {"filesize": len(content), "md5sum": hashlib.md5(content).hexdigest()}
    return {"url": url, "nsamples": n_samples, **more}


def index_of(*shards: dict[str, Any], **more: Any) -> bytes:
    """An index as JSON."""
    return json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards, **more}).encode()


class TarServer(http.server.ThreadingHTTPServer):
    """Serves `files`, and counts what was asked for in `requests`: {(method, path): times}."""

    request_queue_size = 128

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: Counter[tuple[str, str]] = Counter()
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.delay_s = 0.0
        self.ranges = True
        self.spoil: Callable[[str, bytes], bytes] = lambda path, content: content
        self.gate = threading.Event()
        self.gate.set()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def add(self, **files: bytes) -> None:
        """Serve more files: `add(a=...)` is served as /a.tar."""
        self.files |= {f"/{name}.tar": content for name, content in files.items()}

    def gets(self, path: str) -> int:
        """How often a file, or a piece of it, was read."""
        return self.requests["GET", path]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or is killed, is part of some tests."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: TarServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        with self.server.lock:
            self.server.requests[self.command, self.path] += 1
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.at_once, self.server.most_at_once)
        time.sleep(self.server.delay_s)
        content = self.server.files.get(self.path)
        if content is None:
            with self.server.lock:
                self.server.at_once -= 1
            self.send_error(404)
            return
        content = self.server.spoil(self.path, content)
        whole, status = len(content), 200
        if self.server.ranges and (wanted := self.headers.get("Range")):
            first, last = wanted.removeprefix("bytes=").split("-")
            content, status = content[int(first) : int(last) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(content) - 1}/{whole}")
        if with_body:
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.server.gate.wait(60)
        with self.server.lock:
            self.server.at_once -= 1  # before the last bytes, after which the client may ask again
        if with_body:
            self.wfile.write(content[len(content) // 2 :])
        else:
            self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[TarServer]:
    """A server as long as the block runs."""
    server = TarServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
