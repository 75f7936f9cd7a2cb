"""Makes the temporary folder that a driver writes into before it uploads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "ddp_hydra-run-"
LOCK = ".lock"


@contextlib.contextmanager
def scratch_folder(base: str) -> Iterator[Path]:
    """Make a temporary folder, locked by this process, and remove it after the block; remove those of dead processes.

    Args:
        base: the folder to make it in.
    """
    for folder in Path(base).glob(f"{PREFIX}*"):
        _remove_if_abandoned(folder)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def keep(path: Path) -> str:
    """Keep a temporary folder for the user, under a name that is never cleaned up; return its path."""
    kept = path.with_name(path.name.replace(PREFIX, "ddp_hydra-kept-"))
    path.rename(kept)
    return str(kept)


def _remove_if_abandoned(folder: Path) -> None:
    with contextlib.suppress(OSError):  # of another user, locked, or just being made or removed
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)
