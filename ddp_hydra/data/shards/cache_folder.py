"""A folder of shards on the local disk: all processes of a host share it, and keep it within a budget."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddp_hydra.data.shards.tar_index import TarMembers
from ddp_hydra.storage.files import flocked, private_folder, try_lock, unlock
from ddp_hydra.storage.retry import FULL

_OURS = re.compile(r"[0-9a-f]{32}-[\w.-]*\.tar(?P<kind>|\.npz|(\.npz\..*)?\.part)", re.ASCII)
"""Only files with such names are ever removed from the folder."""
_BUSY_S = 0.002


@dataclass(frozen=True)
class CacheEntry:
    """A shard in the folder.

    Args:
        name: of its file.
        size: bytes, with the index of its members.
        used_ns: when it was downloaded or last used, ns since 1970.
        read_ns: when a process last opened it or was done with it, ns since 1970; 0: never.
    """

    name: str
    size: int
    used_ns: int
    read_ns: int


def eviction_rank(file: CacheEntry, files: Collection[str], needed: Mapping[str, int]) -> tuple[int, int]:
    # Return the sort key of a shard for eviction: the lowest goes first.
    # Every shard is read once in an epoch. So the shard that was read last is the one that is not needed for the
    # longest time, and a shard that has not been read yet stays: a cache of half the data set saves half of the
    # downloads. The usual rule, "least recently used first", would drop each shard just before it is read again.
    # Returns: First number: 0: a shard of another index, the least recently used first; 1: not needed any more, the
    # last one read first; 2: still needed, or downloaded for another process, the one that is needed last first.
    if file.name not in files:
        return 0, file.used_ns
    if file.name in needed or not file.read_ns:
        return 2, -needed.get(file.name, 0)
    return 1, -file.read_ns


def with_index(n_bytes: int) -> int:
    # Return the most bytes that a shard of `n_bytes` takes together with the index of its members.
    return n_bytes + n_bytes // 16 + 4096 if n_bytes else 0


class ShardFolder:
    """Finds, adds and evicts the files of one folder.

    Every reader holds a shared lock on the file that it reads, every writer an exclusive lock on the `.part` file that
    it fills. The kernel releases the locks when a process dies. A name may get another file at any time, so after each
    lock it is checked that the name still means the locked file. The folder may be removed at any time: it is made
    again, and a file that is open is filled and read without a name.

    Args:
        path: the folder; it is made if it is missing. If others may write to it, a folder in it is used, see
            `private_folder`.
        budget_bytes: the most that all shards in it may take.

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self._given, self.budget_bytes = path, budget_bytes
        self._make()

    def open(self, name: str) -> int | None:
        while True:
            try:
                descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except (FileNotFoundError, NotADirectoryError):
                return None
            if try_lock(descriptor, fcntl.LOCK_SH) and os.fstat(descriptor).st_nlink:
                return descriptor
            os.close(descriptor)
            time.sleep(_BUSY_S)

    def claim(self, name: str) -> int | None:
        # Open the empty `.part` file of a shard for writing; return None if another process fills it or has done so.
        # A `.part` file that a killed process left is emptied and used.
        self._make()
        part = _open_locked(self._part(name), os.O_CREAT)
        if part is None:
            return None
        if (self.path / name).exists():
            self.abandon(part, name)
            return None
        os.ftruncate(part, 0)
        return part

    def reserve(
        self, part: int, n_bytes: int, files: Collection[str], needed: Mapping[str, int], evict_needed: bool
    ) -> str | None:
        # Returns: Why there is no space, or None if there is.
        with self._exclusive():
            kept, total = self._scan()
            size, disk = os.fstat(part).st_size, os.fstatvfs(part)
            beyond_budget = total + with_index(n_bytes) - with_index(size) - self.budget_bytes
            beyond_disk = n_bytes - size - disk.f_bavail * disk.f_frsize
            ranked = sorted((eviction_rank(file, files, needed), file.name, file) for file in kept)
            candidates = [file for (kind, _), _, file in ranked if evict_needed or kind < 2]
            if not self._evict(candidates, max(beyond_budget, beyond_disk)):
                return "the disk is full" if beyond_disk > beyond_budget else "all shards in it are in use"
            try:
                _allocate(part, n_bytes)
            except OSError as error:
                if error.errno in FULL:
                    return "the disk is full"
                raise
            return None

    def publish(self, part: int, name: str) -> None:
        with self._exclusive():  # a process that scans the folder now might find it under neither name
            if _is_same_file(self._part(name), part):
                with contextlib.suppress(FileNotFoundError):
                    self._part(name).rename(self.path / name)
        fcntl.flock(part, fcntl.LOCK_SH)

    def abandon(self, part: int, name: str) -> None:
        if _is_same_file(self._part(name), part):
            self._part(name).unlink(missing_ok=True)
        os.close(part)

    def is_certain(self, descriptor: int, name: str) -> bool:
        # A shard gets its name before the disk has all of it, because writing may take longer than the download. The
        # index of its members is saved after that. A shard without an index that is older than the last boot may have
        # lost its content in a crash.
        return self.index_path(name).exists() or os.fstat(descriptor).st_ctime > _booted_at()

    def discard(self, descriptor: int, name: str) -> None:
        if _is_same_file(self.path / name, descriptor):
            self._remove(name)

    def index_path(self, name: str) -> Path:
        return self.path / f"{name}.npz"

    def save_index(self, descriptor: int, name: str, members: TarMembers) -> None:
        with self._exclusive():  # else another process might evict the shard between the two
            if _is_same_file(self.path / name, descriptor):
                members.save(self.index_path(name))

    def note_read(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.path / name)

    def note_fetched(self, part: int) -> None:
        os.utime(part, ns=(time.time_ns(), 0))

    def ask_for_space(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.path / "wanted").touch(mode=0o600)

    def asked_ns(self) -> int:
        try:
            return (self.path / "wanted").stat().st_mtime_ns
        except OSError:
            return 0

    def _part(self, name: str) -> Path:
        return self.path / f"{name}.part"

    def _make(self) -> None:
        for is_last in (False, False, True):
            try:
                self.path = private_folder(self._given)
                return
            except OSError as error:  # it may have been removed while it was made
                if is_last:
                    raise OSError(
                        f"{self._given} on {socket.gethostname()} can't be made ({error.strerror}): type "
                        "data.cache_dir=..."
                    ) from None

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with contextlib.ExitStack() as lock:
            while True:
                try:
                    lock.enter_context(flocked(self.path / "lock", os.O_RDWR | os.O_CREAT))
                    break
                except FileNotFoundError:
                    self._make()
            yield

    def _scan(self) -> tuple[list[CacheEntry], int]:
        # Return the shards, and the bytes that all files take; remove the files that killed processes left.
        files: dict[str, os.stat_result] = {}
        kinds: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                if (match := _OURS.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        files[entry.name] = entry.stat(follow_symlinks=False)
                        kinds[entry.name] = match["kind"]
        for name, kind in kinds.items():
            if kind == ".npz" and name.removesuffix(kind) not in files:
                (self.path / name).unlink(missing_ok=True)
                del files[name]
            elif kind.endswith(".part") and (part := _open_locked(self.path / name)) is not None:
                (self.path / name).unlink(missing_ok=True)  # no process fills it
                os.close(part)
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
                kept.append(CacheEntry(name, size, used_ns, status.st_mtime_ns))
        return kept, total

    def _evict(self, candidates: list[CacheEntry], n_bytes: int) -> bool:
        # Remove the first files that no process uses, until `n_bytes` are free; remove none if they are too few.
        names = []
        with contextlib.ExitStack() as locks:
            for file in candidates:
                if n_bytes <= 0:
                    break
                if (descriptor := _open_locked(self.path / file.name)) is not None:
                    locks.callback(unlock, descriptor)
                    names.append(file.name)
                    n_bytes -= file.size
            if n_bytes > 0:
                return False
            for name in names:
                self._remove(name)
            return True

    def _remove(self, name: str) -> None:
        self.index_path(name).unlink(missing_ok=True)
        (self.path / name).unlink(missing_ok=True)


_booted_at = functools.cache(psutil.boot_time)


def _open_locked(path: Path, flags: int = 0) -> int | None:
    # Open a file for writing and lock it; return None if it does not exist, or another process has locked it.
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except FileNotFoundError:
        return None
    if try_lock(descriptor, fcntl.LOCK_EX) and _is_same_file(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _allocate(descriptor: int, n_bytes: int) -> None:
    # Take the space at once, if the file system can: so a full disk is noticed before the download.
    if not n_bytes:
        return
    try:
        os.posix_fallocate(descriptor, 0, n_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, n_bytes)
