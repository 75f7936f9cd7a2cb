"""Decides how long a fork server that nobody uses stays: until its time is over, its code is out of date, or memory is
short."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

LEAST_SHARE = 0.1
"""Share of the memory, of the host or of a cgroup, that has to be available while a server stays for nobody."""
FIRST_S = 30.0
"""Seconds that a server waits for its first connection."""
CURRENT_S = 10.0
"""Seconds between two looks at the imported files, which take some milliseconds."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class Idling:
    """Decides how long a server that nobody uses stays.

    Args:
        address: the path of its socket.

    Attributes:
        keep_warm_s: how long it stays after its last connection.
        is_retired: it leaves as soon as nobody uses it.
    """

    def __init__(self, address: Path) -> None:
        self.address, self.inode = address, address.stat().st_ino
        self.loaded = loaded_files()
        self.since = self.looked_at = time.monotonic()
        self.keep_warm_s, self.stay_s = 0.0, FIRST_S
        self.is_retired = self.has_served = False

    def begin_waiting(self) -> None:
        self.loaded = loaded_files()
        self.since = self.looked_at = time.monotonic()

    def begin(self) -> None:
        """Note that a connection has ended; it may have been the last one."""
        self.since, self.stay_s, self.has_served = time.monotonic(), self.keep_warm_s, True

    @property
    def remaining_s(self) -> float:
        return 0.0 if self.is_retired else max(0.0, self.since + self.stay_s - time.monotonic())

    def is_over(self) -> bool:
        if not self.remaining_s or not self.is_found():
            return True
        now = time.monotonic()
        if now - self.looked_at > CURRENT_S:
            self.looked_at = now
            if not self.is_current():
                return True
        return self.has_served and memory_is_short()

    def is_found(self) -> bool:
        """Return whether its socket still has its place; logind removes it with the user's last session."""
        try:
            return self.address.stat().st_ino == self.inode
        except OSError:
            return False

    def is_current(self) -> bool:
        return not self.has_served or are_current(self.loaded)


def loaded_files() -> dict[str, tuple[int, int, int]]:
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {path: found for path in paths if isinstance(path, str) and (found := _state(path))}


def are_current(files: Mapping[str, tuple[int, int, int]]) -> bool:
    return all(_state(path) == found for path, found in files.items())


def _state(path: str) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced; None if it is gone."""
    try:
        status = os.stat(path)  # noqa: PTH116 (some thousand calls)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def memory_is_short() -> bool:
    return any(left < LEAST_SHARE * limit for left, limit in _memories())


def _memories() -> Iterator[tuple[int, int]]:
    """Yield the bytes that are left and the limit: of the host, and of each cgroup that has a limit."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        host = _numbers(PROC / "meminfo")
        yield host["MemAvailable:"] * 1024, host["MemTotal:"] * 1024
    for folder in _cgroups():
        for limit_file, used_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, KeyError, ValueError):  # another version of cgroups, or no limit
                limit = int((folder / limit_file).read_text())
                used = int((folder / used_file).read_text()) - _numbers(folder / "memory.stat")[cache]
                yield limit - used, limit


def _cgroups() -> Iterator[Path]:
    """Yield the folders of the cgroups that bound the memory of this process, in versions 1 and 2."""
    with contextlib.suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                root = CGROUPS / "memory" if controllers else CGROUPS
                folder = root / path.lstrip("/")
                yield from (folder, *(above for above in folder.parents if above.is_relative_to(root)))


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def memory_bytes() -> int:
    """Return how much memory this process takes, with its share of what it shares with others; 0 if not known."""
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
        text = (PROC / "self" / "smaps_rollup").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
    return 0
