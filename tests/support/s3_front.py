"""A front before the S3 server that fails when it is told to."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest

from ddp_hydra.storage.manifest import Entries, decode_manifest
from tests.support.s3_server import S3Server, s3  # noqa: F401 (a fixture)

Answer = Callable[[str, str], str | None]


@dataclass
class Front:
    """Stands before the server, and passes requests on.

    Attributes:
        answer: told the method and key, says "503", "close", "reset" or "hang" instead of passing on, or None.
        seen: what was asked, as (method, key, status or what was done to it).
        server: the one behind it, for a look behind the scenes.
    """

    url: str
    server: S3Server
    answer: Answer = lambda method, key: None
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def objects(self) -> dict[str, bytes]:
        return self.server.objects("runs")

    def manifest(self) -> Entries:
        got = self.server.client.get_object(Bucket="runs", Key="a/checkpoints/manifest.json")
        return decode_manifest(got["Body"].read()).checkpoints

    def check(self) -> None:
        """The manifest names complete objects only."""
        manifest = None
        while manifest != (manifest := self.manifest()):  # else it was changed while the bucket was listed
            sizes = self.server.sizes("runs")
        for name, entry in manifest.items():
            if name.startswith("step-"):
                assert sizes[f"a/checkpoints/{name}"] == entry.size


@pytest.fixture
def front(monkeypatch, plain_environment, credentials, s3) -> Iterator[Front]:  # noqa: F811
    """An S3 server with an empty bucket 'runs', and the environment that leads there."""

    class FrontHandler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url, method = urlsplit(self.path), self.command
            key = url.path.removeprefix("/runs").lstrip("/")
            if url.query == "delete":  # of many, though it is one
                method, key = "DELETE", re.findall("<Key>(.*)</Key>", body.decode())[0]
            what = front.answer(method, key)
            front.seen.append((method, key, what or "passed"))
            if what == "503":
                self.reply(503, [], b"<Error><Code>SlowDown</Code></Error>")
            elif what is not None:
                if what == "hang":
                    front.released.wait()
                if what == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
            else:
                # Closed also where the client has left meanwhile.
                with contextlib.closing(http.client.HTTPConnection(urlsplit(s3.endpoint_url).netloc)) as server:
                    server.request(self.command, self.path, body, dict(self.headers))
                    got = server.getresponse()
                    self.reply(got.status, got.getheaders(), got.read())

        def reply(self, status, headers, content):
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                    if name.lower() == "content-length" and self.command != "HEAD":
                        continue
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *args):
            pass

    for name in ("GET", "PUT", "POST", "HEAD", "DELETE"):
        setattr(FrontHandler, f"do_{name}", FrontHandler.pass_on)

    class FrontServer(http.server.ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

        def handle_error(self, *args):
            pass

    s3.client.create_bucket(Bucket="runs")
    before = FrontServer(("127.0.0.1", 0), FrontHandler)
    front = Front(f"http://127.0.0.1:{before.server_port}", s3)
    monkeypatch.setattr("ddp_hydra.writers.checkpoint_mirror.INTERVAL_S", 0.02)
    monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
    thread = threading.Thread(target=before.serve_forever, args=(0.01,))
    thread.start()
    yield front
    front.released.set()
    before.shutdown()
    before.server_close()
    thread.join()
