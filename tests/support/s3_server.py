"""An S3 server for the tests, and an environment without anybody's credentials."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest


@dataclass
class S3Server:
    """A moto server on loopback.

    `fill` makes a bucket and returns its name, `add` puts more there, `publish` opens it to all.
    """

    endpoint_url: str
    fill: Callable[[Mapping[str, bytes]], str]
    add: Callable[[str, Mapping[str, bytes]], None]
    publish: Callable[[str], None]
    close: Callable[[], None]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    """No AWS variable, proxy or config file of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.fixture
def credentials(monkeypatch):
    """Credentials in the environment that the test's server takes."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")


@pytest.fixture
def s3() -> Iterator[S3Server]:
    """An S3 server in this process, with credentials unchecked."""
    with s3_server() as server:
        yield server


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """For tests that share one."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from moto.s3.models import get_canned_acl, s3_backends
    from werkzeug.serving import make_server

    class QuietHandler(MotoRequestHandler):
        def log(self, *args):
            pass

    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    backend.reset()
    app = create_backend_app("s3")
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=QuietHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def fill(objects: Mapping[str, bytes]) -> str:
        name = f"bucket-{len(backend.buckets)}"
        backend.create_bucket(name, "us-east-1")
        add(name, objects)
        return name

    def add(bucket: str, objects: Mapping[str, bytes]) -> None:
        for key, content in objects.items():
            backend.put_object(bucket, key, content)

    def publish(bucket: str) -> None:
        for key in list(backend.buckets[bucket].keys):
            backend.put_object_acl(bucket, key, get_canned_acl("public-read"))

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()
        with contextlib.suppress(OSError):  # a connection keeps it
            kept_port.bind(server.server_address)  # else a server of another test might get it, and answer

    kept_port = socket.socket()
    kept_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    yield S3Server(f"http://127.0.0.1:{server.server_port}", fill, add, publish, close)
    if thread.is_alive():
        close()
    kept_port.close()
    backend.reset()


@pytest.fixture
def png() -> Callable[..., bytes]:
    """Make a PNG of one colour: `png(red, green, blue, size=8)`."""
    from PIL import Image

    def make(red: int = 0, green: int = 0, blue: int = 0, size: int = 8) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (size, size), (red, green, blue)).save(file, "PNG")
        return file.getvalue()

    return make
