"""Keeps checkpoints that the client has fetched on the host that wrote them, while the worker lives.

A rank that resumes from one of them on this host, after a crash or when a paused job of a sweep continues, finds it in
the page cache instead of waiting until the client has sent it back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

MAX_BYTES = 2 * 2**30
"""Bytes of all kept checkpoints of a worker; the oldest go first."""
FREE_SHARE = 0.1
"""Share of the disk that is left free; a checkpoint that would take some of it is not kept."""


def keep(local_directory: str, file: Path, sha256: str) -> None:
    """Keep a file under its hash, or remove it if there is no room.

    Args:
        local_directory: of the worker.
        file: on the same disk; it is moved.
        sha256: of its content.
    """
    folder = _folder(local_directory)
    folder.mkdir(exist_ok=True)
    disk, size = shutil.disk_usage(folder), file.stat().st_size
    if size > MAX_BYTES or disk.free < FREE_SHARE * disk.total:
        file.unlink()
        return
    file.replace(_path(local_directory, sha256))
    os.utime(_path(local_directory, sha256))
    kept = sorted(((path.stat().st_mtime_ns, path.stat().st_size, path) for path in folder.iterdir()), reverse=True)
    total = 0
    for _, bytes_, path in kept:
        total += bytes_
        if total > MAX_BYTES:
            path.unlink()


def link(local_directory: str, sha256: str, size: int, target: Path) -> bool:
    """Give a kept file another name; return whether there was one.

    Args:
        local_directory: of the worker.
        sha256: of its content.
        size: in bytes.
        target: the name, on the same disk.
    """
    path = _path(local_directory, sha256)
    with contextlib.suppress(OSError):
        if path.stat().st_size == size:
            target.unlink(missing_ok=True)
            target.hardlink_to(path)
            os.utime(path)
            return True
    return False


def _folder(local_directory: str) -> Path:
    return Path(local_directory) / "ddp_hydra-checkpoints"


def _path(local_directory: str, sha256: str) -> Path:
    return _folder(local_directory) / Path(sha256).name
