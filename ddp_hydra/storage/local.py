"""Files in a folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddp_hydra.storage.base import ObjectChangedError, TransferCounters
from ddp_hydra.storage.files import replacing

LOCK = ".lock"


class LocalFolder:
    """Lists, reads and writes the files below a folder, as if they were the objects of a bucket.

    Args:
        folder: where they are.
        traffic: counts requests and bytes; None for counters of its own.

    Raises:
        FileNotFoundError: there is no such folder.
    """

    ranges = True

    def __init__(self, folder: str | Path, traffic: TransferCounters | None = None) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.url = f"file://{self.folder}"
        self.traffic = traffic or TransferCounters()

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield path below the folder and size in bytes of each file under `prefix`, links followed.

        Two links to one folder give its files twice, as in a plain walk; a link to a folder around it gives none. The
        size of a link to nothing is 0: reading it says that it is not there.

        Raises:
            FileNotFoundError: there is no such folder.
            PermissionError: a folder may not be read.
        """
        pending: list[tuple[Path, frozenset[str]]] = [(self.path(prefix), frozenset())]
        inside = len(str(self.folder).rstrip("/")) + 1
        while pending:
            folder, above = pending.pop()
            if (real := os.path.realpath(folder)) in above:
                continue
            try:
                entries = os.scandir(folder)
            except FileNotFoundError:
                if self.folder.is_dir():
                    continue  # it was removed in the meantime
                raise FileNotFoundError(f"there is no folder {self.folder}: check data.bucket=...") from None
            except PermissionError:
                if folder.name == "lost+found":  # of a file system, for root alone
                    continue
                raise
            except NotADirectoryError:
                raise FileNotFoundError(
                    f"{self.folder if self.folder.is_file() else folder} is a file, and must be a folder: unpack an "
                    "archive, or check data.bucket=..."
                ) from None
            around = above | {real}
            with entries:
                for entry in entries:
                    try:
                        found = entry.stat()
                    except OSError as error:
                        if not entry.is_symlink():
                            if isinstance(error, FileNotFoundError):  # as above
                                continue
                            raise
                        yield entry.path[inside:].replace(os.sep, "/"), 0
                        continue
                    if stat.S_ISDIR(found.st_mode):
                        pending.append((Path(entry.path), around))
                    elif stat.S_ISREG(found.st_mode):
                        yield entry.path[inside:].replace(os.sep, "/"), found.st_size

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under `prefix`; raises as `objects`."""
        folder = self.path(prefix)
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []

    def get(self, key: str, size: int | None = None) -> bytes:
        """Return the content of a file; a disk gives all of it, so that the size it had does not matter.

        Raises:
            FileNotFoundError: there is no such file.
            PermissionError: it may not be read.
            OSError: the disk says so.
        """
        content = self.path(key).read_bytes()
        self.traffic.read(len(content))
        return content

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` (exclusive) of a file; raises as `get`."""
        with self.path(key).open("rb") as file:
            file.seek(start)
            content = file.read(end - start)
        self.traffic.read(len(content))
        return content

    def stream(self, key: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield a file from a byte on; raises as `get`."""
        yield self.get_range(key, start, size)

    def size(self, key: str) -> int:
        """Return the size of a file in bytes; raises as `get`."""
        return self.path(key).stat().st_size

    def put(self, key: str, content: Any, size: int = 0) -> None:
        """Write a file, whole or not at all: bytes, the path of a file to copy, or a file that is open for reading."""
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as part:
            if isinstance(content, Path):
                shutil.copyfile(content, part)
            elif hasattr(content, "read"):
                with part.open("wb") as file:
                    shutil.copyfileobj(content, file, 2**20)
            else:
                part.write_bytes(content)

    def delete(self, key: str) -> None:
        """Remove a file, if it is there."""
        self.path(key).unlink(missing_ok=True)

    def etag(self, key: str) -> str | None:
        """Return a text that differs for each content of a file, None if there is no file."""
        try:
            found = self.path(key).stat()
        except FileNotFoundError:
            return None
        return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"

    def put_if(self, key: str, content: bytes, etag: str | None) -> str:
        """Write a file if it still has this ETag (None: if there is no file), and return its new ETag.

        Raises:
            ObjectChangedError: the file has another ETag.
        """
        with self._locked():
            if self.etag(key) != etag:
                raise ObjectChangedError(key)
            self.put(key, content)
            return str(self.etag(key))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep others from conditional writes meanwhile, on all hosts where the disk has locks (NFS 4 has)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # without locks, this is the best that can be done
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def path(self, key: str) -> Path:
        """Return where a file is.

        Raises:
            ValueError: the key would lead out of the folder.
        """
        if key.startswith("/") or ".." in key.split("/"):
            raise ValueError(f"{key!r} leads out of {self.folder}: give paths below it, without '..'")
        return self.folder / key

    def shown(self) -> str:
        """Return its URL, for messages."""
        return self.url

    def close(self) -> None:
        """Nothing is open."""
