"""Writes files atomically, never outside of the run directory; finds user caches.

What cannot be written raises a RecordError that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self

from ddp_hydra.errors import RecordError

_HINTS = {
    errno.ENOSPC: "free some space there, or choose another place",
    errno.EDQUOT: "free some of your quota there, or choose another place",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a folder that you may write"),
    errno.ENOENT: "its folder is missing: was it removed?",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is in the place of a folder; choose another place"),
    errno.EFBIG: "the file is larger than this system or `ulimit -f` allows",
    errno.ELOOP: "it is a symbolic link; remove it, nothing is written through links in a run directory",
}
_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        "ENOSPC", "EDQUOT", "EIO", "ESTALE", "EAGAIN", "EINTR", "EBUSY", "ETIMEDOUT", "ENFILE", "EMFILE", "ENOMEM",
        "ENOBUFS", "ENOTCONN", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "EREMOTEIO",
    )
    if hasattr(errno, name)
)  # fmt: skip
_PART, _LOCK = ".part-", ".lock"
_PROBE_BYTES = 4096


def cannot_write(what: str | Path, error: OSError) -> RecordError:
    """Return the error for a failed write, as one sentence."""
    hint = _HINTS.get(error.errno or 0, "what was written before stays whole")
    return RecordError(f"cannot write {error.filename or what}: {error.strerror or error}; {hint}")


def passing(error: BaseException) -> OSError | None:
    """Return the cause of a failed write if it is temporary: a full disk, a file server that does not answer."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause if isinstance(cause, OSError) and cause.errno in _PASSING else None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a sentence that names `path`."""
    try:
        yield
    except ConnectionError:  # of a store that is read meanwhile
        raise
    except OSError as error:
        error.filename = str(path)  # a temporary name would puzzle the reader
        raise cannot_write(path, error) from error


def open_run_dir(run_dir: str | Path, n_bytes: int = 0) -> Path:
    """Make a run directory if it is missing, write a file of `n_bytes` there as a trial, and return the directory."""
    folder = Path(run_dir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = part_of(folder / "probe")
        try:
            probe.write_bytes(bytes(n_bytes))
        finally:
            probe.unlink(missing_ok=True)
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder, if it is missing, for the files that the block writes.

    If the block fails, the folders that were made are removed, as far as they are empty.
    """
    missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    try:
        open_run_dir(folder, _PROBE_BYTES)
        yield
    except BaseException:
        for one in missing:
            with contextlib.suppress(OSError):
                one.rmdir()
        raise


def prepared_path(run_dir: Path, path: PurePosixPath | str) -> Path:
    """Return the path of a file in a run directory, and make its folders: none may be a symbolic link."""
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise RecordError(f"cannot write {path}: it is not inside the run directory {run_dir}")
    folder = run_dir
    for part in parts[:-1]:
        folder = folder / part
        with writing(folder):
            if not folder.is_symlink() and not folder.is_dir():
                folder.mkdir(exist_ok=True)
                sync(folder.parent)
        if folder.is_symlink():
            raise RecordError(f"cannot write {run_dir / path}: {folder} {_HINTS[errno.ELOOP].removeprefix('it ')}")
    return folder / parts[-1]


def part_of(target: Path) -> Path:
    """Return a new hidden name in the folder of `target`, for a file that is not complete yet."""
    return target.with_name(_PART + secrets.token_hex(6))


def remove_parts(folder: Path) -> None:
    """Remove the incomplete files and folders that an interrupted writer left in `folder`."""
    for part in folder.glob(_PART + "*"):
        remove(part)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(target: Path, *, durable: bool = True, part: Path | None = None) -> Iterator[Path]:
    """Yield the name of a new file, which replaces `target` when the block ends, and is removed if the block fails.

    Args:
        target: the file to replace, in a folder that exists.
        durable: wait until the disk has the new file, so that either the old or the new one survives a power cut.
        part: the name of the new file; None: a hidden name in the folder of `target`.
    """
    part = part or part_of(target)
    try:
        yield part
        if durable:
            sync(part)
        part.replace(target)
        if durable:
            sync(target.parent)
    finally:
        part.unlink(missing_ok=True)


def write_atomic(target: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace the file `target` by `content`, whole or not at all; see `replacing`."""
    with writing(target), replacing(target, durable=durable) as part:
        part.write_bytes(content)


@contextmanager
def scratch_folder(prefix: str, base: str) -> Iterator[Path]:
    """Make a temporary folder, locked by this process, and remove it after the block.

    Folders of processes that were killed before they could remove theirs are removed, too.
    """
    for folder in Path(base).glob(f"{prefix}*"):
        _remove_if_abandoned(folder)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    new = path / f"{_LOCK}-new"
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        new.rename(path / _LOCK)  # has its name only once it is locked
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def _remove_if_abandoned(folder: Path) -> None:
    with contextlib.suppress(OSError):  # of another user, locked, or just being made or removed
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


@contextmanager
def flocked(path: Path, flags: int = os.O_RDONLY) -> Iterator[None]:
    """Hold the lock of a file or folder inside the block, on all hosts where the disk has locks (NFS 4 has).

    With O_CREAT in `flags`, a file is made.
    """
    handle = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # without locks, this is the best that can be done
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        unlock(handle)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file or folder; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Unlock a file and close it: a process that was forked meanwhile has it open, too, and would keep the lock."""
    with contextlib.suppress(OSError):  # of a disk without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, would survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise  # some file systems know no fsync of a folder
    finally:
        os.close(handle)


class NotingFile:
    """A file that is written from its begin to its end.

    It notes the sum of what was written, and the first error of a write: torch does not say it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: Exception | None = None
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write some bytes."""
        try:
            n = self._write(data)
            self.sha256.update(data)
            return n
        except Exception as error:
            self.error = self.error or error
            raise

    @contextmanager
    def explained(self) -> Iterator[Self]:
        """Raise why a write in the block failed, in place of what torch raises."""
        try:
            yield self
        except Exception as error:
            raise self.error or error from None

    def _write(self, data: Any) -> int:
        return self.file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self.file.flush()


class AppendFile:
    """A file that grows by complete pieces, which readers see at once.

    Args:
        path: made at the first piece; a symbolic link is refused.
        ends_with: if the file has content with another end, this is appended first.
    """

    def __init__(self, path: Path, ends_with: bytes = b"") -> None:
        self.path = path
        self._ends_with = ends_with
        self._handle: int | None = None
        self._torn: int | None = None  # the size to go back to

    def append(self, piece: bytes) -> None:
        """Add one piece, or nothing: what was written of it is removed again."""
        with writing(self.path):
            if self._handle is None:
                self._handle = self._open()
            self._take_back()
            self._torn = os.fstat(self._handle).st_size
            try:
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(self._handle, rest) :]
                self._torn = None
            finally:
                self._take_back()

    def _take_back(self) -> None:
        if self._torn is not None and self._handle is not None:
            os.ftruncate(self._handle, self._torn)
            self._torn = None

    def close(self) -> None:
        """Close the file; a later piece opens it again."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                self._take_back()
            handle, self._handle = self._handle, None
            with writing(self.path):
                os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.path, flags, 0o666)
        try:
            size, end = os.fstat(handle).st_size, self._ends_with
            if end and size and os.pread(handle, len(end), max(0, size - len(end))) != end:
                os.write(handle, end)
        except OSError:
            os.close(handle)
            raise
        return handle


def user_cache() -> Path:
    """Return the folder of this user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_hydra"


def private_folder(path: Path) -> Path:
    """Make a folder to which no other user may write, and return it.

    Whoever may write to a folder may replace the files in it. So if the given folder belongs to somebody else, or
    others may write to it, this user gets a folder of their own inside it. Users that share a cache share no files.
    """
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
