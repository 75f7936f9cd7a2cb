"""Runs an S3 server on loopback with scikit-learn's handwritten digits: images without network or account.

`acquire` starts the server as a child process, once for all users in this process. The last `release` stops it. The
child exits when its stdin closes, so it never outlives this process.
"""

from __future__ import annotations

import atexit
import csv
import gzip
import importlib.util
import io
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

BUCKET = "digits"
CREDENTIALS = ("embedded", "embedded")
"""Access key and secret key of the server; they protect nothing."""

IMAGE_SIZE = 32
_NEEDED = ("moto", "flask", "flask_cors", "sklearn", "PIL")
_START_TIMEOUT_S = 60

_lock = threading.Lock()
_server: _Server | None = None
_users = 0


def acquire() -> str:
    """Add a user of the server; start the server if it is not running.

    Returns:
        Its endpoint, e.g. "http://127.0.0.1:40123".

    Raises:
        ModuleNotFoundError: a package of the `demo` extra is not installed.
        ConnectionError: the server does not start.
    """
    global _server, _users
    with _lock:
        if _server is not None and not _server.is_running():
            _server.stop()
            _server = None
        if _server is None:
            _server = _Server()
        _users += 1
        return _server.endpoint_url


def release() -> None:
    """Remove a user of the server; stop the server after the last one."""
    global _server, _users
    with _lock:
        _users -= 1
        if _users <= 0 and _server is not None:
            _server.stop()
            _server = None


class _Server:
    """The child process, as its parent handles it."""

    def __init__(self) -> None:
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise ModuleNotFoundError(
                f"the embedded digits need {', '.join(missing)}, which is not installed: type "
                '`pip install "ddp-hydra[demo]"`, or give a bucket with data.bucket=...'
            )
        self._parent = os.getpid()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (stop() closes it)
        folder = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ddp_hydra.data.demo_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # so that Ctrl-C does not stop it while the job reads its last batches
        )
        atexit.register(self.stop)
        self.endpoint_url = f"http://127.0.0.1:{self._read_port()}"

    def _read_port(self) -> int:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            ready = select.select([stdout], [], [], _START_TIMEOUT_S)[0]
            line = stdout.readline().strip() if ready else b""
        if line.isdigit():
            return int(line)
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        last_lines = self._errors.read().decode(errors="replace").split("\n")[-5:]
        output = " ".join(last_lines).strip() or f"it printed nothing in {_START_TIMEOUT_S} s"
        self.stop()
        raise ConnectionError(f"the embedded S3 server did not start: {output}. Give a bucket with data.bucket=...")

    def is_running(self) -> bool:
        """Return whether it runs and was started by this process, not by one that this one was forked from."""
        return self._parent == os.getpid() and self._process.poll() is None

    def stop(self) -> None:
        """Stop it and wait until it has exited."""
        if self._parent != os.getpid():
            return
        atexit.unregister(self.stop)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def digits() -> Iterator[tuple[str, bytes]]:
    """Render the 1797 digits, 32x32 pixels; every fifth image of each digit is for validation.

    Yields:
        The key ("train/<digit>/<number>.png" or "val/...") and the PNG file.
    """
    from PIL import Image

    # scikit-learn's own reader would import all of scikit-learn, which takes longer than the rest of the start.
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    seen: Counter[str] = Counter()
    with gzip.open(file, "rt") as lines:
        for number, row in enumerate(csv.reader(lines)):
            pixels, digit = row[:64], str(int(float(row[64])))
            seen[digit] += 1
            part = "val" if seen[digit] % 5 == 0 else "train"
            small = Image.frombytes("L", (8, 8), bytes(int(float(value)) * 255 // 16 for value in pixels))
            png = io.BytesIO()
            small.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC).save(png, "PNG")
            yield f"{part}/{digit}/{number:04d}.png", png.getvalue()


def _serve() -> None:
    """Run as the child process: fill the server, print its port, and serve until stdin closes."""
    import logging

    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.moto_server.werkzeug_app import create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # Fill it directly, because that takes seconds over HTTP.
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    backend.create_bucket(BUCKET, "us-east-1")
    for key, png in digits():
        backend.put_object(BUCKET, key, png)
    # Serve the S3 application alone: moto's usual dispatcher spends half the time of a request on finding it.
    server = make_server("127.0.0.1", 0, create_backend_app("s3"), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.write(1, f"{server.server_port}\n".encode())
    # The parent reads only the port; later output must not fail a request.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    _serve()
