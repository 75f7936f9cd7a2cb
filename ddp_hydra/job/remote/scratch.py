"""Make the temporary folder that a driver writes into before it uploads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "ddp_hydra-run-"
LOCK = ".lock"


class Scratch:
    """Make a temporary folder, locked by this process. Folders of processes that have died are removed.

    Args:
        base: the folder to make it in.

    Attributes:
        path: of the folder.
    """

    def __init__(self, base: str) -> None:
        for folder in Path(base).glob(f"{PREFIX}*"):
            _remove_if_abandoned(folder)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self._handle: int | None = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder, unless it is kept."""
        if self._handle is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._handle)
            self._handle = None

    def keep(self) -> str:
        """Keep the folder for the user, under a name that is never cleaned up; return its path."""
        kept = self.path.with_name(self.path.name.replace(PREFIX, "ddp_hydra-kept-"))
        self.path.rename(kept)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        return str(kept)


def _remove_if_abandoned(folder: Path) -> None:
    with contextlib.suppress(OSError):  # of another user, locked, or just being made or removed
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)
