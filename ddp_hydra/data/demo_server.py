"""Runs an S3 store on loopback with scikit-learn's handwritten digits: images without network or account.

`acquire` starts and fills it, once for all users in this process. The last `release` stops it.
"""

from __future__ import annotations

import atexit
import csv
import gzip
import importlib.util
import io
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddp_hydra.data import seaweed

BUCKET = "digits"
IMAGE_SIZE = 32
_NEEDED = {"obstore": "obstore", "sklearn": "scikit-learn", "PIL": "Pillow"}
_START_TIMEOUT_S = 60
_OR_A_BUCKET = "or give a bucket or folder with data.bucket=..."
_PUTS = 16  # beside each other


_lock = threading.Lock()
_server: seaweed.Seaweed | None = None
_users = 0


def acquire() -> seaweed.Seaweed:
    global _server, _users
    with _lock:
        if _server is not None and not _server.is_running():
            _server.stop()
            _server = None
        if _server is None:
            _server = _start()
        _users += 1
        return _server


def release() -> None:
    global _server, _users
    with _lock:
        _users -= 1
        if _users <= 0 and _server is not None:
            _server.stop()
            _server = None


def _start() -> seaweed.Seaweed:
    packages = [package for name, package in _NEEDED.items() if importlib.util.find_spec(name) is None]
    if packages:
        raise ModuleNotFoundError(
            f'the embedded digits need {", ".join(packages)}: type `pip install "ddp-hydra[demo]"`, {_OR_A_BUCKET}'
        )
    if missing := seaweed.missing():
        raise ModuleNotFoundError(f"the embedded digits need {missing}, {_OR_A_BUCKET}")
    store = seaweed.Seaweed(BUCKET)
    atexit.register(store.stop)
    try:
        files = list(digits())  # while the store starts
        bucket = store.wait_until_ready(_START_TIMEOUT_S)
        with ThreadPoolExecutor(_PUTS) as pool:
            list(pool.map(lambda file: bucket.put(*file), files))
    except ConnectionError as error:
        store.stop()
        raise ConnectionError(
            f"the embedded S3 store did not start: {error}. Give a bucket with data.bucket=..."
        ) from None
    return store


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
