"""Runs an S3 store on loopback with scikit-learn's handwritten digits: images without network or account.

`acquire` starts a child process, once for all users in this process. The last `release` stops it. The child starts the
store, fills it, and ends it when its own stdin closes: neither outlives this process, also where it is killed.
"""

from __future__ import annotations

import atexit
import csv
import gzip
import importlib.util
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ddp_hydra.data import seaweed

BUCKET = "digits"
IMAGE_SIZE = 32
_NEEDED = {"obstore": "obstore", "sklearn": "scikit-learn", "PIL": "Pillow"}
_START_TIMEOUT_S = 60
_END_TIMEOUT_S = 5
_OR_A_BUCKET = "or give a bucket or folder with data.bucket=..."
_PUTS = 16  # beside each other


class Endpoint(NamedTuple):
    """Locates the store and names its credentials: key and secret."""

    url: str
    credentials: tuple[str, str]


_lock = threading.Lock()
_server: _Server | None = None
_users = 0


def acquire() -> Endpoint:
    # Returns: Its URL, e.g. "http://127.0.0.1:40123", with access key and secret key.
    global _server, _users
    with _lock:
        if _server is not None and not _server.is_running():
            _server.stop()
            _server = None
        if _server is None:
            _server = _Server()
        _users += 1
        return _server.endpoint


def release() -> None:
    global _server, _users
    with _lock:
        _users -= 1
        if _users <= 0 and _server is not None:
            _server.stop()
            _server = None


class _Server:
    """The child process, as its parent handles it."""

    def __init__(self) -> None:
        packages = [package for name, package in _NEEDED.items() if importlib.util.find_spec(name) is None]
        if packages:
            raise ModuleNotFoundError(
                f"the embedded digits need {', '.join(packages)}, which is not installed: type "
                f'`pip install "ddp-hydra[demo]"`, {_OR_A_BUCKET}'
            )
        if missing := seaweed.missing():
            raise ModuleNotFoundError(f"the embedded digits need {missing}, {_OR_A_BUCKET}")
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
        self.endpoint = self._read_endpoint()

    def _read_endpoint(self) -> Endpoint:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            ready = select.select([stdout], [], [], _START_TIMEOUT_S)[0]
            line = stdout.readline() if ready else b""
        if line.startswith(b"["):
            url, credentials = json.loads(line)
            return Endpoint(url, tuple(credentials))
        self._end()
        self._errors.seek(0)
        last_lines = self._errors.read().decode(errors="replace").split("\n")[-5:]
        output = " ".join(last_lines).strip() or f"it printed nothing in {_START_TIMEOUT_S} s"
        self.stop()
        raise ConnectionError(f"the embedded S3 store did not start: {output}. Give a bucket with data.bucket=...")

    def is_running(self) -> bool:
        return self._parent == os.getpid() and self._process.poll() is None

    def stop(self) -> None:
        if self._parent != os.getpid():
            return
        atexit.unregister(self.stop)
        self._end()
        self._errors.close()

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        for ask in (self._process.terminate, self._process.kill):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_END_TIMEOUT_S)
                return
            ask()
        self._process.wait()


def digits() -> Iterator[tuple[str, bytes]]:
    # Yields: The key ("train/<digit>/<number>.png" or "val/...") and the PNG file.
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
    # Run as the child process: start the store, fill it, print where it is, and wait until stdin closes.
    signal.signal(signal.SIGTERM, _exit)
    with seaweed.Seaweed(BUCKET) as store:
        files = list(digits())  # while the store starts
        bucket = store.wait_until_ready(_START_TIMEOUT_S)
        with ThreadPoolExecutor(_PUTS) as pool:
            list(pool.map(lambda file: bucket.put(*file), files))
        os.write(1, json.dumps([store.endpoint_url, store.credentials]).encode() + b"\n")
        threading.Thread(target=_end_with, args=(store,), daemon=True).start()
        os.read(0, 1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_with(store: seaweed.Seaweed) -> None:
    # End this process when the store has ended, so that the parent may start another.
    store.wait()
    os.kill(os.getpid(), signal.SIGTERM)


def _exit(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once
    sys.exit(0)


if __name__ == "__main__":
    _serve()
