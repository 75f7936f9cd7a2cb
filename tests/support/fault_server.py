"""An S3 server on loopback that misbehaves on purpose: what stores do in the wild, one fault at a time."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Fault = str | tuple[int, str] | None
ANSWERS = {
    "503": (503, "SlowDown"), "500": (500, ""), "301": (301, "PermanentRedirect"), "404": (404, "NoSuchKey"),
    "403": (403, "AccessDenied"), "expired": (400, "ExpiredToken"),
}  # fmt: skip
"""Faults that are an answer: its status, and the code of its error."""
WRONG_ANSWERS = {
    "error": b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>try again</Message></Error>",
    "html": b"<html><body><h1>We will be back soon</h1></body></html>",
    "blank": b"",
}
"""With a clean 200, in place of a page of a listing or of an object."""
WRONG_PAGES = ("cut", "without token", "hollow")
"""Pages of a listing: cut off, more without a token, more but nothing in it."""


class FaultServer:
    """Buckets in memory, by path-style addresses.

    Args:
        objects: {bucket/key: content}.
        tls: certificate and key in one file, to speak https.

    Attributes:
        fault: called with each request's number and path; returns one of `ANSWERS`, `WRONG_ANSWERS`, `WRONG_PAGES`,
            a status and a code, "reset", "half", "stall", "slow" or "short" (half an object under a clean 200 or 206),
            or None to serve it.
        requests: (method, path, Host header) of all so far.
        access_keys: those that are taken; None: all, and none at all.
        page: keys in a page of a listing.
        ranges: whether a part of an object can be asked for; otherwise all of it comes, with 200.
        stall_s: how long a stalled body is held.
        slow_s: between two of the six parts of a slow body.
    """

    def __init__(self, objects: Mapping[str, bytes], tls: Path | None = None) -> None:
        self.objects = dict(objects)
        self.fault: Callable[[int, str], Fault] = lambda number, path: None
        self.requests: list[tuple[str, str, str]] = []
        self.access_keys: set[str] | None = None
        self.page = 1000
        self.ranges = True
        self.stall_s = 30.0
        self.slow_s = 0.02
        self.closing = threading.Event()
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.answer(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                pass  # the client went away, as it may

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and let no answer stall any longer."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urllib.parse.urlsplit(request.path)
        path = urllib.parse.unquote(url.path).lstrip("/")
        with self._lock:
            self.requests.append((request.command, path, request.headers.get("Host", "")))
            number = len(self.requests) - 1
        fault = self.fault(number, path)
        if fault == "reset":
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.close_connection = True
            return request.connection.close()
        if fault in WRONG_ANSWERS:
            return self._say(request, 200, WRONG_ANSWERS[fault])
        if said := fault if isinstance(fault, tuple) else ANSWERS.get(fault or ""):
            status, code = said
            return self._say(request, status, f"<Error><Code>{code}</Code></Error>".encode() if code else b"")
        if self.access_keys is not None:
            key = re.findall(r"Credential=([^/]+)/", request.headers.get("Authorization", ""))
            if not key or key[0] not in self.access_keys:
                return self._say(request, 403, b"<Error><Code>InvalidAccessKeyId</Code></Error>")
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        if "list-type" in query:
            return self._say(request, 200, self._listing(path.rstrip("/"), query, fault))
        if path not in self.objects:
            return self._say(request, 404, b"<Error><Code>NoSuchKey</Code></Error>")
        return self._send(request, self.objects[path], fault)

    def _send(self, request: BaseHTTPRequestHandler, content: bytes, fault: Fault) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")) if self.ranges else None
        start, end = (int(found[1]), int(found[2] or len(content) - 1) + 1) if found else (0, len(content))
        part = content[start:end]
        if fault == "short":
            part = part[: len(part) // 2]
        request.send_response(206 if found else 200)
        if found:
            request.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(content)}")
        request.send_header("Content-Length", str(len(part)))
        request.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
        request.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        request.end_headers()
        if request.command == "HEAD":
            return
        half = len(part) // 2
        if fault in ("half", "stall"):
            request.wfile.write(part[:half])
            request.wfile.flush()
            if fault == "stall":
                self.closing.wait(self.stall_s)
            request.close_connection = True
        elif fault == "slow":
            for at in range(0, len(part), max(1, len(part) // 5)):
                request.wfile.write(part[at : at + max(1, len(part) // 5)])
                request.wfile.flush()
                time.sleep(self.slow_s)
        else:
            request.wfile.write(part)

    def _listing(self, bucket: str, query: dict[str, str], fault: Fault) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after") or ""
        keys = sorted(path[len(bucket) + 1 :] for path in self.objects if path.startswith(f"{bucket}/"))
        found = [key for key in keys if key.startswith(prefix)]
        folders: list[str] = []
        if delimiter:
            inside = {key: key[len(prefix) :].partition(delimiter) for key in found}
            folders = sorted({prefix + head + delimiter for head, cut, _ in inside.values() if cut})
            found = [key for key, (_, cut, _) in inside.items() if not cut]
        found = [key for key in found if key > after]
        page, more = found[: self.page], len(found) > self.page
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[f'{bucket}/{key}'])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag></Contents>"
            for key in page
        )
        folded = "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        if fault == "without token":
            token = ""
        if fault == "hollow":
            more, contents = True, ""
            token = f"<NextContinuationToken>{escape(after or '!')}</NextContinuationToken>"
        document = (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}{folded}</ListBucketResult>"
        ).encode()
        return document[: len(document) // 2] if fault == "cut" else document

    def _say(self, request: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


@contextmanager
def serving(objects: Mapping[str, bytes], tls: Path | None = None) -> Iterator[FaultServer]:
    server = FaultServer(objects, tls)
    try:
        yield server
    finally:
        server.close()
