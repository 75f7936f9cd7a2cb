"""Finds the folders for this user's caches."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_hydra"


def private_folder(path: Path) -> Path:
    # Whoever may write to a folder may replace the files in it. So if the given folder belongs to somebody else, or
    # others may write to it, this user gets a folder of their own inside it. Users that share a cache share no files.
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _only_mine(path.stat()):
        return path
    mine = path / f"user-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        mine.mkdir(mode=0o700)
    if not _only_mine(mine.lstat()):
        raise PermissionError(errno.EACCES, f"{mine} is another user's, or others may write to it")
    return mine


def _only_mine(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
