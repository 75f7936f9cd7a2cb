"""Holds files on their way from a rank to the client.

A rank writes a file into its outbox, in its worker's folder, and names it in a record. The client fetches the file,
verifies it and removes it. The removal is the acknowledgement: a rank with too many files in its outbox waits.

Checkpoints that the client has fetched are kept on the host that wrote them, while the worker lives. A rank that
resumes from one of them there, after a crash or when a paused job of a sweep continues, finds it in the page cache
instead of waiting until the client has sent it back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from ddp_hydra.errors import ConfigError

CHUNK_BYTES = 8 * 2**20
COPIED_BYTES = 16 * CHUNK_BYTES
MAX_KEPT_BYTES = 2 * 2**30
"""Bytes of all kept checkpoints of a worker; the oldest go first."""
FREE_SHARE = 0.1
"""Share of the disk that is left free; a checkpoint that would take some of it is not kept."""


def folder(worker: Any, gang: str, rank: int, way: str = "out") -> Path:
    """Return the outbox of one rank on a worker; make it if it does not exist."""
    secure(worker.local_directory)
    folder = path(worker.local_directory, gang, rank, way)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def secure(local_directory: str) -> None:
    """Close a worker's folder to other users of the host, for ranks import code from it.

    Dask uses any writable folder in the host's temporary folder, whoever made it.

    Raises:
        ConfigError: it belongs to another user, or another user can replace it.
    """
    folder = Path(local_directory).resolve()
    found, above, me = folder.stat(), folder.parent.stat(), os.getuid()
    if found.st_uid == me and found.st_mode & 0o077:
        folder.chmod(0o700)
    if above.st_uid == me and above.st_mode & stat.S_IWOTH:  # others may add files, but not move this folder
        folder.parent.chmod(stat.S_IMODE(above.st_mode) | stat.S_ISVTX)
    is_open = above.st_uid != me and above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
    if found.st_uid != me or above.st_uid not in (me, 0) or is_open:
        wrong, owner = (folder, found.st_uid) if found.st_uid != me else (folder.parent, above.st_uid)
        raise ConfigError(
            f"another user of host {socket.gethostname()} can swap the worker's folder {folder}, which ranks import "
            f"from: {wrong} belongs to user id {owner}, not {me}{', and all may write there' if is_open else ''}. Give "
            "the workers a folder of your own: DASK_TEMPORARY_DIRECTORY, or dask worker --local-directory <folder>"
        )


def path(local_directory: str, gang: str, rank: int, way: str = "out") -> Path:
    return Path(local_directory) / "ddp_hydra" / gang / f"rank-{rank}" / way


def _file(worker: Any, gang: str, rank: int, name: str) -> Path:
    """Return the path of a file of a rank. It makes no folder: a suspended process may ask after the gang's end."""
    secure(worker.local_directory)
    return path(worker.local_directory, gang, rank) / Path(name).name


def read(gang: str, rank: int, name: str, offset: int, dask_worker: Any = None) -> bytes:
    with _file(dask_worker, gang, rank, name).open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)


def sees(gang: str, rank: int, target: str, nonce: bytes, dask_worker: Any = None) -> bool:
    """Return whether a file of the client is on a disk of this host, too. Runs on the worker."""
    try:
        return Path(target).read_bytes() == nonce
    except OSError:
        return False


def copy(gang: str, rank: int, name: str, target: str, offset: int, dask_worker: Any = None) -> int:
    """Copy the next bytes of a file into one of the client that this host sees; return how many. Runs on the worker."""
    with _file(dask_worker, gang, rank, name).open("rb") as file, Path(target).open("r+b") as out:
        file.seek(offset)
        out.truncate(offset)
        out.seek(offset)
        while out.tell() < offset + COPIED_BYTES and (piece := file.read(CHUNK_BYTES)):
            out.write(piece)
        return out.tell() - offset


def write(gang: str, rank: int, name: str, data: bytes, offset: int, dask_worker: Any = None) -> str:
    """Write a piece of a file for a rank; return its path. Runs on the worker, called by the client."""
    target = _incoming(dask_worker, gang, rank, name)
    if not offset:
        target.unlink(missing_ok=True)  # it may be another name of a kept file
        target.touch()
    with target.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    return str(target)


def _incoming(worker: Any, gang: str, rank: int, name: str) -> Path:
    """Return the path of a file for a rank, which may be a part of a checkpoint in a folder; make the folder."""
    target = folder(worker, gang, rank, "in").joinpath(*PurePosixPath(name).parts[-2:])
    target.parent.mkdir(exist_ok=True)
    return target


def local_directory(dask_worker: Any = None) -> str:
    return str(dask_worker.local_directory)


def is_same_file(path: str, size: int, mtime_ns: int) -> bool:
    try:
        found = Path(path).stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (size, mtime_ns) and os.access(path, os.R_OK)


def remove(gang: str, rank: int, name: str, dask_worker: Any = None) -> None:
    _file(dask_worker, gang, rank, name).unlink(missing_ok=True)


def keep(gang: str, rank: int, name: str, sha256: str, dask_worker: Any = None) -> None:
    """Take a checkpoint that the client has fetched out of the outbox, but keep it here. Runs on the worker.

    It is kept under its hash; without room for it, it is removed.
    """
    file = _file(dask_worker, gang, rank, name)
    place = _kept(dask_worker.local_directory, sha256)
    with contextlib.suppress(FileNotFoundError):
        place.parent.mkdir(exist_ok=True)
        disk, size = shutil.disk_usage(place.parent), file.stat().st_size
        if size > MAX_KEPT_BYTES or disk.free < FREE_SHARE * disk.total:
            file.unlink()
            return
        file.replace(place)
        os.utime(place)
        kept = [(path.stat().st_mtime_ns, path.stat().st_size, path) for path in place.parent.iterdir()]
        total = 0
        for _, size, path in sorted(kept, reverse=True):
            total += size
            if total > MAX_KEPT_BYTES:
                path.unlink()


def find(gang: str, rank: int, name: str, sha256: str, size: int, dask_worker: Any = None) -> str:
    """Return the path of a file for a rank, if this host has kept it; "" if not. Runs on the worker."""
    target = _incoming(dask_worker, gang, rank, name)
    kept = _kept(dask_worker.local_directory, sha256)
    with contextlib.suppress(OSError):
        if kept.stat().st_size == size:
            target.unlink(missing_ok=True)
            target.hardlink_to(kept)
            os.utime(kept)
            return str(target)
    return ""


def _kept(local_directory: str, sha256: str) -> Path:
    return Path(local_directory) / "ddp_hydra-checkpoints" / Path(sha256).name


def has_files(worker: Any) -> bool:
    try:
        return any(Path(worker.local_directory, "ddp_hydra").glob("*/rank-*/out/*"))
    except FileNotFoundError:  # a task that ends has just removed a folder
        return True


def clear(gang: str, dask_worker: Any = None) -> None:
    shutil.rmtree(Path(dask_worker.local_directory) / "ddp_hydra" / gang, ignore_errors=True)
