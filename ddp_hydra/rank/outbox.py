"""Files on their way from a rank to the client.

A rank writes a file into its worker's spool and names it in a record; the client takes it from there, verifies
it and removes it. That the file is gone is the receipt: a rank with too many files in its spool waits.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

from ddp_hydra.errors import ConfigError

CHUNK_BYTES = 8 * 2**20


def folder(worker: Any, gang: str, rank: int, way: str = "out") -> Path:
    """The spool of one rank on a worker, made where it does not exist.

    Args:
        worker: the Dask worker.
        gang: the gang's name.
        rank: which rank.
        way: out for files of the rank, in for files that it is given.

    Raises:
        ConfigError: other users of the host can put something else in its place.
    """
    secure(worker.local_directory)
    folder = path(worker.local_directory, gang, rank, way)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def secure(local_directory: str) -> None:
    """Close a worker's folder to other users of the host, for ranks import and read what is in it.

    Dask takes any folder in the host's temporary folder that it can write, whoever has made it.

    Raises:
        ConfigError: it is somebody else's, or somebody else can put another in its place.
    """
    folder = Path(local_directory).resolve()
    found, above, me = folder.stat(), folder.parent.stat(), os.getuid()
    if found.st_uid == me and found.st_mode & 0o077:
        folder.chmod(0o700)
    if above.st_uid == me and above.st_mode & stat.S_IWOTH:  # others may add to it, but not move what is mine
        folder.parent.chmod(stat.S_IMODE(above.st_mode) | stat.S_ISVTX)
    is_open = above.st_uid != me and above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
    if found.st_uid != me or above.st_uid not in (me, 0) or is_open:
        wrong, owner = (folder, found.st_uid) if found.st_uid != me else (folder.parent, above.st_uid)
        raise ConfigError(
            f"another user of host {socket.gethostname()} can swap the worker's folder {folder}, which ranks import "
            f"from: {wrong} belongs to user id {owner}, not {me}{', and all may write there' if is_open else ''}. Give "
            "the workers a temporary folder of your own: DASK_TEMPORARY_DIRECTORY=<folder> in their environment, or "
            "dask worker --local-directory <folder>"
        )


def path(local_directory: str, gang: str, rank: int, way: str = "out") -> Path:
    """Where the spool of a rank is, below its worker's folder."""
    return Path(local_directory) / "ddp_hydra" / gang / f"rank-{rank}" / way


def read(gang: str, rank: int, name: str, offset: int, dask_worker: Any = None) -> bytes:
    """One piece of a spooled file. Runs on the worker, called by the client."""
    with (folder(dask_worker, gang, rank) / Path(name).name).open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)


def write(gang: str, rank: int, name: str, data: bytes, first: bool, dask_worker: Any = None) -> str:
    """Append a piece of a file for a rank; returns its path. Runs on the worker, called by the client."""
    target = folder(dask_worker, gang, rank, "in") / Path(name).name
    with target.open("wb" if first else "ab") as file:
        file.write(data)
    return str(target)


def is_same_file(path: str, size: int, mtime_ns: int) -> bool:
    """Whether a file of the client is visible here under the same path. Runs on the worker."""
    try:
        found = Path(path).stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (size, mtime_ns)


def remove(gang: str, rank: int, name: str, dask_worker: Any = None) -> None:
    """Remove a spooled file: the client has it. Runs on the worker."""
    (folder(dask_worker, gang, rank) / Path(name).name).unlink(missing_ok=True)


def waiting(worker: Any) -> bool:
    """Whether files of ranks wait on this worker for their client."""
    return any(Path(worker.local_directory, "ddp_hydra").glob("*/rank-*/out/*"))


def clear(gang: str, dask_worker: Any = None) -> None:
    """Remove all spools of a gang. Runs on the worker."""
    shutil.rmtree(Path(dask_worker.local_directory) / "ddp_hydra" / gang, ignore_errors=True)
