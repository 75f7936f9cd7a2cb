"""Files between ranks and the client: from disk to disk on one host, in pieces through Dask otherwise."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

from distributed import Client

from ddp_hydra.errors import RecordError
from ddp_hydra.rank import outbox

PIECE_S = 15.0
"""How long one piece of a file may take."""


def fetch(
    client: Client,
    worker: str,
    local_directory: str,
    gang: str,
    rank: int,
    file: Mapping[str, Any],
    target: Path,
    is_lost: Callable[[], bool] = lambda: False,
) -> None:
    """Put a spooled file at `target` and remove it from the spool. The caller verifies it, and gives it its name.

    Args:
        client: of the cluster.
        worker: address of the rank's worker.
        local_directory: of that worker.
        gang: the gang's name.
        rank: whose spool.
        file: source (its path there), size and sha256.
        target: where to put it.
        is_lost: whether the worker is given up meanwhile.
    """
    name = Path(file["source"]).name
    if not _take_local(outbox.path(local_directory, gang, rank) / name, file["size"], target):
        with target.open("wb") as out:
            while out.tell() < file["size"]:
                piece = call(client, worker, outbox.read, gang, rank, name, out.tell(), is_lost=is_lost)
                if not piece:
                    break
                out.write(piece)
        call(client, worker, outbox.remove, gang, rank, name, is_lost=is_lost)


def drop(
    client: Client,
    worker: str,
    local_directory: str,
    gang: str,
    rank: int,
    file: Mapping[str, Any],
    is_lost: Callable[[], bool] = lambda: False,
) -> None:
    """Remove a spooled file; the arguments are those of `fetch`."""
    source = outbox.path(local_directory, gang, rank) / Path(str(file["source"])).name
    if _is_here(source, file.get("size")):
        source.unlink(missing_ok=True)
    else:
        call(client, worker, outbox.remove, gang, rank, source.name, is_lost=is_lost)


def call(
    client: Client,
    worker: str,
    function: Callable[..., Any],
    *args: Any,
    is_lost: Callable[[], bool] = lambda: False,
) -> Any:
    """Run a function on one worker.

    Raises:
        OSError: the worker does not answer in time, or is gone. Dask alone would try for half a minute.
    """
    loop: Any = client.loop
    answer = asyncio.run_coroutine_threadsafe(client._run(function, *args, workers=[worker]), loop.asyncio_loop)
    deadline = time.monotonic() + PIECE_S
    while not answer.done() and not is_lost() and time.monotonic() < deadline:
        futures.wait([answer], timeout=0.1)
    if not answer.done():
        answer.cancel()
        raise OSError(f"worker {worker} {'is lost' if is_lost() else f'does not answer for {PIECE_S:g} s'}")
    try:
        return answer.result()[worker]
    except (TimeoutError, KeyError) as error:
        raise OSError(f"worker {worker} does not answer ({type(error).__name__})") from None


def _take_local(source: Path, size: int, target: Path) -> bool:
    """Move within this host, where the spool is visible from here."""
    if not _is_here(source, size):
        return False
    shutil.move(source, target)
    return True


def _is_here(source: Path, size: int | None) -> bool:
    """Whether a spool is visible from here, and holds the file itself, not a link."""
    return source.is_file() and source.resolve() == source.absolute() and source.stat().st_size == size


def send(client: Client, worker: str, gang: str, rank: int, source: Path) -> str:
    """Make a file of the client readable for a rank; returns the path there.

    Args:
        client: of the cluster.
        worker: address of the rank's worker.
        gang: the gang's name.
        rank: into whose spool.
        source: the file here.
    """
    found = source.stat()
    if call(client, worker, outbox.is_same_file, str(source), found.st_size, found.st_mtime_ns):
        return str(source)
    path = ""
    with source.open("rb") as file:
        while not path or file.tell() < os.fstat(file.fileno()).st_size:
            piece = file.read(outbox.CHUNK_BYTES)
            path = call(client, worker, outbox.write, gang, rank, source.name, piece, not path)
    return path


def verify(path: Path, size: int, sha256: str) -> None:
    """Check a file against its announcement.

    Raises:
        RecordError: size or hash differ.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if path.stat().st_size != size or found != sha256:
        raise RecordError(
            f"{path.name} arrived damaged: {path.stat().st_size} of {size} bytes, sha256 {found[:12]}… instead of "
            f"{sha256[:12]}…; it was not put in place"
        )
