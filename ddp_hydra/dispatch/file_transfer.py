"""Transfers files between ranks and the client: by a move on one host, otherwise in pieces through Dask."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

from distributed import Client

from ddp_hydra.rank import outbox
from ddp_hydra.record import File

PIECE_S = 60.0
"""Seconds that one piece of a file may take. A worker that goes silent meanwhile is noticed sooner."""


class WorkerSilent(OSError):
    """A worker does not answer, or is gone."""


def fetch(source: Path, file: File, target: Path, call: Callable[..., Any]) -> None:
    """Put a file of a rank at `target` and remove it from the rank's outbox. The caller verifies it.

    Args:
        source: its path in the outbox, on the rank's host.
        file: its size and sha256, and whether it is a checkpoint.
        target: the path here.
        call: calls a function of `rank.outbox` there, for the rank.
    """
    if _is_here(source, file.size):
        shutil.move(source, target)
        return
    with target.open("wb") as out:
        while out.tell() < file.size:
            piece = call(outbox.read, source.name, out.tell())
            if not piece:
                break
            out.write(piece)
    if file.checkpoint is not None:  # a rank may resume from it there
        call(outbox.keep, source.name, file.sha256)
    else:
        call(outbox.remove, source.name)


def drop(source: Path, file: File, call: Callable[..., Any]) -> None:
    """Remove a file from a rank's outbox; arguments: see `fetch`."""
    if _is_here(source, file.size):
        source.unlink(missing_ok=True)
    else:
        call(outbox.remove, source.name)


def _is_here(source: Path, size: int) -> bool:
    is_file = os.path.isfile(source)  # noqa: PTH113 (Path.is_file raises where the folder is closed)
    return is_file and source.resolve() == source.absolute() and source.stat().st_size == size


def call(
    client: Client,
    worker: str,
    function: Callable[..., Any],
    *args: Any,
    is_lost: Callable[[], bool] = lambda: False,
) -> Any:
    """Run a function on one worker, and return its result.

    Raises:
        WorkerSilent: it does not answer in time, or is gone. Dask alone would try for half a minute.
    """
    loop: Any = client.loop
    answer = asyncio.run_coroutine_threadsafe(client._run(function, *args, workers=[worker]), loop.asyncio_loop)
    deadline = time.monotonic() + PIECE_S
    while not answer.done() and not is_lost() and time.monotonic() < deadline:
        futures.wait([answer], timeout=0.1)
    if not answer.done():
        answer.cancel()
        raise WorkerSilent(f"worker {worker} {'is lost' if is_lost() else f'does not answer for {PIECE_S:g} s'}")
    try:
        return answer.result()[worker]
    except (TimeoutError, KeyError) as error:
        raise WorkerSilent(f"worker {worker} does not answer ({type(error).__name__})") from None


def send(client: Client, worker: str, gang: str, rank: int, source: Path) -> str:
    """Send a file of the client to a rank's host, unless that has it already; return the path there.

    It has it if it sees it under the same path, or wrote it and has kept it.
    """
    found = source.stat()
    if call(client, worker, outbox.is_same_file, str(source), found.st_size, found.st_mtime_ns):
        return str(source)
    with source.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    path: str = call(client, worker, outbox.find, gang, rank, source.name, sha256, found.st_size)
    if path:
        return path
    with source.open("rb") as file:
        while not path or file.tell() < os.fstat(file.fileno()).st_size:
            piece = file.read(outbox.CHUNK_BYTES)
            path = call(client, worker, outbox.write, gang, rank, source.name, piece, not path)
    return path
