"""A folder of shards on the local disk, that all processes of a host share and keep within a number of bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddp_hydra.data.user_cache import private_folder

_OURS = re.compile(r"[0-9a-f]{32}-[\w.-]*\.tar(?P<kind>|\.npz|(\.npz\..*)?\.part)", re.ASCII)
"""Only such files are ever removed, whatever else is in the folder."""
_BUSY_S = 0.002


@dataclass(frozen=True)
class Kept:
    """A shard in the folder.

    Args:
        name: of its file.
        size: with its index, bytes.
        used_ns: when it was downloaded or last used.
        read_ns: when it was last opened or finished with; 0: never.
    """

    name: str
    size: int
    used_ns: int
    read_ns: int


def eviction_rank(file: Kept, ours: Collection[str], awaited: Mapping[str, int]) -> tuple[int, int]:
    """Say when a shard has to go: the lowest rank first.

    Every shard is read once in an epoch. So the one just read is the one not needed for the longest time, and what
    has not been read yet stays: a cache of half the data set saves half of the downloads, where the usual "least
    recently used first" would drop each shard just before it is read again.

    Args:
        file: the shard.
        ours: the files of the index that is being read.
        awaited: place in line of the files that this process is about to read.

    Returns:
        0: of another index, by last use; 1: read, the latest first; 2: awaited, the farthest first; 3 and 4:
        downloaded ahead and not read yet, for others and for this process.
    """
    if file.name not in ours:
        return 0, file.used_ns
    if file.name in awaited:
        return (2 if file.read_ns else 4), -awaited[file.name]
    return (1, -file.read_ns) if file.read_ns else (3, file.used_ns)


def with_index(n_bytes: int) -> int:
    """Return what a shard of so many bytes takes at most, together with the index of its members."""
    return n_bytes + n_bytes // 16 + 4096 if n_bytes else 0


POLITE = 1
"""Up to this rank a shard may go for one that is not needed yet."""


class ShardFolder:
    """Finds, adds and evicts the files of one folder.

    Every reader holds a shared lock on the file it reads, every writer an exclusive one on the `.part` that it
    fills: the kernel lets go of them when a process dies. Nobody waits for a lock that belongs to a name: after
    each lock it is checked that the name still means the same file.

    Args:
        path: the folder; it is made where it is missing. Where others may write to it, a part of it is used, see
            `private_folder`.
        budget_bytes: what all its shards may take.

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self.path = private_folder(path)
        self.budget_bytes = budget_bytes

    def open(self, name: str) -> int | None:
        """Open a shard for reading: nobody evicts it before the descriptor, and all that is mapped of it, is gone."""
        while True:
            try:
                descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            if _lock(descriptor, fcntl.LOCK_SH) and os.fstat(descriptor).st_nlink:
                return descriptor
            os.close(descriptor)
            time.sleep(_BUSY_S)

    def claim(self, name: str) -> int | None:
        """Open the empty `.part` of a shard for writing; None where another is at it, or was just done.

        What a killed process left there is taken over.
        """
        part = self._part(name)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not _lock(descriptor, fcntl.LOCK_EX) or not _is(part, descriptor):
            os.close(descriptor)
            return None
        if (self.path / name).exists():
            self.abandon(descriptor, name)
            return None
        os.ftruncate(descriptor, 0)
        return descriptor

    def reserve(
        self, part: int, n_bytes: int, ours: Collection[str], awaited: Mapping[str, int], polite: bool
    ) -> str | None:
        """Let a `.part` grow to so many bytes, and evict what must go for it.

        Args:
            part: its descriptor.
            n_bytes: the size it shall have.
            ours: as in `eviction_rank`.
            awaited: as in `eviction_rank`.
            polite: evict nothing that may still be needed.

        Returns:
            Why there is no room, or None where there is.
        """
        with self._alone():
            kept, total = self._look()
            size, disk = os.fstat(part).st_size, os.fstatvfs(part)
            beyond_budget = total + with_index(n_bytes) - with_index(size) - self.budget_bytes
            beyond_disk = n_bytes - size - disk.f_bavail * disk.f_frsize
            ranks = {file.name: eviction_rank(file, ours, awaited) for file in kept}
            candidates = [file for file in kept if not polite or ranks[file.name][0] <= POLITE]
            candidates.sort(key=lambda file: ranks[file.name])
            if not self._evict(candidates, max(beyond_budget, beyond_disk)):
                return "the disk is full" if beyond_disk > beyond_budget else "all that is there is in use"
            try:
                _allocate(part, n_bytes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return "the disk is full"
                raise
            return None

    def publish(self, part: int, name: str) -> None:
        """Give a complete `.part` its name; its descriptor is then one of a reader."""
        with self._alone():  # who counts meanwhile might find it under neither name
            self._part(name).rename(self.path / name)
        fcntl.flock(part, fcntl.LOCK_SH)

    def abandon(self, part: int, name: str) -> None:
        """Remove a `.part`."""
        self._part(name).unlink(missing_ok=True)
        os.close(part)

    def is_certain(self, descriptor: int, name: str) -> bool:
        """Whether a shard is whole for sure.

        It has its name before the disk has all of it, for that may take longer than the download did; the index of
        its members is saved after. A shard without one that is older than the running system may have lost its
        content when the last one crashed.
        """
        return self.index_path(name).exists() or os.fstat(descriptor).st_ctime > _booted_at()

    def discard(self, descriptor: int, name: str) -> None:
        """Remove a shard that is damaged, if its name still means the opened file."""
        if _is(self.path / name, descriptor):
            self._remove(name)

    def index_path(self, name: str) -> Path:
        """Return where the index of a shard's members is saved."""
        return self.path / f"{name}.npz"

    def note_read(self, name: str) -> None:
        """Remember that a shard was read just now."""
        with contextlib.suppress(OSError):
            os.utime(self.path / name)

    def note_fetched(self, part: int) -> None:
        """Remember that a shard has not been read yet."""
        os.utime(part, ns=(time.time_ns(), 0))

    def ask_for_room(self) -> None:
        """Ask all processes to let go of shards that they could open again."""
        (self.path / "wanted").touch(mode=0o600)

    def last_asked_ns(self) -> int:
        """Return when somebody asked for room; 0: never."""
        try:
            return (self.path / "wanted").stat().st_mtime_ns
        except OSError:
            return 0

    def _part(self, name: str) -> Path:
        return self.path / f"{name}.part"

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep all others from counting and evicting."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _look(self) -> tuple[list[Kept], int]:
        """Return the shards and the bytes that all files take, without those that a killed process left."""
        files: dict[str, os.stat_result] = {}
        kinds: dict[str, str] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if (match := _OURS.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        files[entry.name] = entry.stat(follow_symlinks=False)
                        kinds[entry.name] = match["kind"]
        for name, kind in kinds.items():
            if kind == ".npz" and name.removesuffix(kind) not in files:
                (self.path / name).unlink(missing_ok=True)
                del files[name]
            elif kind.endswith(".part") and self._remove_left_over(name):
                del files[name]
        kept, total = [], 0
        for name, status in files.items():
            if kinds[name] == ".npz":
                continue
            index = files.get(f"{name}.npz")
            size = with_index(status.st_size) if index is None else status.st_size + index.st_size
            total += size
            if not kinds[name]:
                used_ns = max(status.st_atime_ns, status.st_mtime_ns)
                kept.append(Kept(name, size, used_ns, status.st_mtime_ns))
        return kept, total

    def _remove_left_over(self, name: str) -> bool:
        """Remove a `.part` that nobody fills, while nobody can begin to; whether it was one."""
        try:
            descriptor = os.open(self.path / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            if not _lock(descriptor, fcntl.LOCK_EX) or not _is(self.path / name, descriptor):
                return False
            (self.path / name).unlink()
            return True
        finally:
            os.close(descriptor)

    def _evict(self, candidates: list[Kept], n_bytes: int) -> bool:
        """Remove the first of the files that nobody uses, or none where they are too few."""
        locked: list[tuple[int, str]] = []
        try:
            for file in candidates:
                if n_bytes <= 0:
                    break
                with contextlib.suppress(FileNotFoundError):
                    descriptor = os.open(self.path / file.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    if _lock(descriptor, fcntl.LOCK_EX):
                        locked.append((descriptor, file.name))
                        n_bytes -= file.size
                    else:
                        os.close(descriptor)
            if n_bytes > 0:
                return False
            for _, name in locked:
                self._remove(name)
            return True
        finally:
            for descriptor, _ in locked:
                os.close(descriptor)

    def _remove(self, name: str) -> None:
        self.index_path(name).unlink(missing_ok=True)
        (self.path / name).unlink(missing_ok=True)


@functools.cache
def _booted_at() -> float:
    return psutil.boot_time()


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Whether a name still means an open file."""
    try:
        there, here = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _allocate(descriptor: int, n_bytes: int) -> None:
    """Take the space at once, where the file system can: a disk that is full says so before the download."""
    if not n_bytes:
        return
    try:
        os.posix_fallocate(descriptor, 0, n_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, n_bytes)
