"""Files on their way from a rank to the client.

A rank writes a file into its worker's spool and names it in a record; the client takes it from there, verifies
it and removes it. That the file is gone is the receipt: a rank with too many files in its spool waits.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

CHUNK_BYTES = 8 * 2**20


def folder(worker: Any, gang: str, rank: int, way: str = "out") -> Path:
    """The spool of one rank on a worker, made where it does not exist.

    Args:
        worker: the Dask worker.
        gang: the gang's name.
        rank: which rank.
        way: out for files of the rank, in for files that it is given.
    """
    folder = path(worker.local_directory, gang, rank, way)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
