"""Saturn Cloud's REST interface for Dask clusters, on loopback, with real schedulers and workers behind it."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509

from tests.integration.support.by_hand import address_in, dask_scheduler, dask_worker
from tests.integration.support.certificates import Authority

ID = "c0ffee"
TOKEN = "only-for-this-test"


class Saturn:
    """What the platform knows: there is one cluster at most."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority(folder / "ca", "saturn")
        cert, key = self.authority.issue("server")
        self.tls = ("--tls-ca-file", self.authority.ca, "--tls-cert", cert, "--tls-key", key)
        self.asked: list[tuple[str, Any]] = []
        self.stack: contextlib.ExitStack | None = None
        self.workers, self.most = 0, 4
        self.file = Path()

    @property
    def is_running(self) -> bool:
        return self.stack is not None

    def create(self, config: dict[str, Any]) -> dict[str, Any]:
        if self.stack is None:
            self.stack = contextlib.ExitStack()
            home = Path(tempfile.mkdtemp(dir=self.folder))
            self.file = self.stack.enter_context(dask_scheduler(home, *self.tls))
            self.workers = 0
            self.scale(config.get("n_workers", 0) * config.get("nprocs", 1))
        return {"status": "ready", "id": ID}

    def scale(self, n: int) -> dict[str, Any]:
        assert self.stack is not None
        while self.workers < min(n, self.most):
            self.workers += 1
            self.stack.enter_context(dask_worker(self.file.parent, self.file, f"w{self.workers}", *self.tls))
        return {}

    def close(self) -> dict[str, Any]:
        stack, self.stack = self.stack, None
        if stack is not None:
            stack.close()
        return {}

    def answer(self, method: str, path: str, body: bytes) -> bytes:
        action = path.removeprefix("/api/dask_clusters").strip("/").removeprefix(ID).strip("/")
        if (method, action) == ("POST", "csr"):
            request = x509.load_pem_x509_csr(body)
            return self.authority.sign(request) + self.authority.ca.read_bytes()
        given = json.loads(body or "{}")
        self.asked.append((f"{method} {action}".strip(), given))
        sizes = [{"name": "medium", "display": "Medium - 2 cores"}, {"name": "g4dnxlarge", "display": "T4"}]
        if (method, action) == ("GET", "info") and ID in path:
            answer: Any = {"scheduler_address": address_in(self.file), "dashboard_link": "none"}
        elif (method, action) == ("GET", "info"):
            answer = {"server_options": {"size": sizes}}
        elif method == "GET":
            answer = {"status": "running" if self.is_running else "stopped"}
        else:
            answer = {"": self.create, "scale": lambda asked: self.scale(asked["n"]), "close": lambda _: self.close()}[
                action
            ](given)
        return json.dumps(answer).encode()


@contextlib.contextmanager
def serve(saturn: Saturn) -> Iterator[str]:
    """Answer HTTP; yields SATURN_BASE_URL."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond("GET", b"")

        def do_POST(self) -> None:
            self.respond("POST", self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        def respond(self, method: str, body: bytes) -> None:
            if self.headers["Authorization"] != f"token {TOKEN}":
                code, content = 401, b'{"message": "Invalid token"}'
            else:
                with lock:
                    code, content = 200, saturn.answer(method, self.path.partition("?")[0], body)
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()
            saturn.close()
