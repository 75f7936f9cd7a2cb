"""Bounds of cache folders."""

from __future__ import annotations

import contextlib
from pathlib import Path

_bounds: dict[Path, float] = {}


def create_cleanup_background_process(
    pattern: str | Path, maxsize: float = 1e12, maxfiles: int = 1000, every: float = 60
) -> CleanupProcess:
    """Bound a cache folder. No process is needed: data sets keep to the bound whenever they download a shard.

    Args:
        pattern: the cache folder, or its files, as "_cache/*". It is for data sets that are made later in this process.
        maxsize: bytes.
        maxfiles: not used: the bound is in bytes.
        every: not used.
    """
    _bounds[_folder(pattern)] = maxsize
    return CleanupProcess()


def bound_of(folder: str | Path | None) -> float | None:
    """Return the bound of a cache folder, bytes; None if there is none."""
    return None if folder is None else _bounds.get(_folder(folder))


def _folder(pattern: str | Path) -> Path:
    path = Path(pattern).expanduser().absolute()
    while any(char in path.name for char in "*?["):
        path = path.parent
    return path


class CleanupProcess:
    """Stands for the process that wids would start."""

    def start(self) -> None:
        """Do nothing."""

    def is_alive(self) -> bool:
        """Return True: the bound holds."""
        return True

    def terminate(self) -> None:
        """Do nothing."""

    def join(self, timeout: float | None = None) -> None:
        """Return at once."""


def keep_most_recent_files(pattern: str, maxsize: float = 1e12, maxfiles: int = 1000, debug: bool = False) -> None:
    """Delete the oldest files of a folder.

    Args:
        pattern: of paths, as "folder/*".
        maxsize: bytes that may stay.
        maxfiles: number of files that may stay.
        debug: not used.
    """
    path = Path(pattern)
    found = [(file.stat(), file) for file in path.parent.glob(path.name) if file.is_file()]
    found.sort(key=lambda item: item[0].st_mtime_ns, reverse=True)
    total = 0
    for number, (status, file) in enumerate(found):
        total += status.st_size
        if total > maxsize or number >= maxfiles:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
