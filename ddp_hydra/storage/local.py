"""Files in a folder."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_hydra.console.text import expanded
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.base import ObjectChangedError, Store, TemporaryError, TransferCounters, check_key
from ddp_hydra.storage.files import flocked, passing, replacing

LOCK = ".lock"


class LocalFolder(Store):
    """Lists, reads and writes the files below a folder, as if they were the objects of a bucket; see `Store`.

    A disk is asked once: `retry_timeout_s` is 0 where it is not given.
    """

    def __init__(
        self,
        folder: str | Path,
        traffic: TransferCounters | None = None,
        setting: str | None = "data.bucket",
        retry_timeout_s: float = 0.0,
    ) -> None:
        self.folder = expanded(folder).absolute()
        self.setting = setting
        self.url = f"file://{self.folder}" if setting is not None else str(self.folder)
        super().__init__(retry_timeout_s=retry_timeout_s, traffic=traffic)

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield path below the folder and size in bytes of each file under `prefix`, links followed.

        Two links to one folder give its files twice, as in a plain walk; a link to a folder around it gives none. The
        size of a link to nothing is 0: reading it says that it is not there.

        Raises:
            FileNotFoundError: there is no such folder.
            PermissionError: a folder may not be read.
        """
        try:
            yield from self._walk(prefix)
        except OSError as error:
            raise self._final(self._explain(error, prefix)) from None

    def _walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        typed = f"{self.setting}=..." if self.setting is not None else "the URL"

        def note(error: OSError) -> None:
            if isinstance(error, FileNotFoundError) and not self.folder.is_dir():
                raise FileNotFoundError(f"there is no folder {self.folder}: check {typed}") from None
            if isinstance(error, NotADirectoryError):
                file = self.folder if self.folder.is_file() else error.filename
                raise FileNotFoundError(
                    f"{file} is a file, and must be a folder: unpack an archive, or check {typed}"
                ) from None
            # What is gone was removed in the meantime; lost+found is for root alone.
            if not isinstance(error, FileNotFoundError) and Path(error.filename).name != "lost+found":
                raise error

        inside = len(str(self.folder).rstrip("/")) + 1
        chains: dict[str, frozenset[str]] = {}  # real paths of the folders around one: a link to those is not followed
        for folder, folders, files in os.walk(self.path(prefix), onerror=note, followlinks=True):
            around = chains.pop(folder, frozenset()) | {os.path.realpath(folder)}
            begin = f"{folder.rstrip('/')}/"
            paths = {name: f"{begin}{name}" for name in folders}
            folders[:] = [name for name in folders if os.path.realpath(paths[name]) not in around]
            chains |= {paths[name]: around for name in folders}
            for name in files:
                path = f"{begin}{name}"
                try:
                    found = os.stat(path)  # noqa: PTH116 (a million path objects would take ten times as long)
                except OSError as error:
                    if Path(path).is_symlink():
                        yield path[inside:], 0
                    else:
                        note(error)
                else:
                    if stat.S_ISREG(found.st_mode):
                        yield path[inside:], found.st_size

    def _explain(self, error: Exception, key: str | None) -> Exception:
        if self.setting is not None or not isinstance(error, OSError) or error.errno is None:
            return error
        message = f"{self.folder}/{key}: {error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(message)
        if passing(error):
            return TemporaryError(message)
        return ConfigError(f"{message}: is the disk mounted there, and may its user write it?")

    def _folders(self, client: None, prefix: str) -> list[str]:
        try:
            return sorted(entry.name for entry in self.path(prefix).iterdir() if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _get(self, client: None, key: str, size: int | None) -> bytes:
        return self.path(key).read_bytes()  # a disk gives all of it: the size it had does not matter

    def _get_range(self, client: None, key: str, start: int, end: int) -> bytes:
        with self.path(key).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def _size(self, client: None, key: str) -> int:
        return self.path(key).stat().st_size

    def _put(self, client: None, key: str, content: Any) -> None:
        target = self.path(key)
        _make_folder(target.parent)
        try:
            with replacing(target) as part:
                if hasattr(content, "read"):
                    content.seek(0)
                    with part.open("wb") as file:
                        shutil.copyfileobj(content, file, 2**20)
                else:
                    part.write_bytes(content)
        except OSError as error:
            error.filename = str(target)  # a full disk names none
            raise

    def _put_if(self, client: None, key: str, content: bytes, etag: str | None) -> str:
        _make_folder(self.folder)
        with flocked(self.folder / LOCK, os.O_RDWR | os.O_CREAT):
            if self.etag(key) != etag:
                raise ObjectChangedError(key)
            self._put(client, key, content)
            return str(self.etag(key))

    def _delete(self, client: None, key: str) -> None:
        path = self.path(key)
        path.unlink(missing_ok=True)
        if path.parent != self.folder:
            with suppress(OSError):  # it is not empty: a bucket has no empty folders
                path.parent.rmdir()

    def _etag(self, client: None, key: str) -> str:
        found = self.path(key).stat()
        return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"

    def path(self, key: str) -> Path:
        """Return where a file is."""
        check_key(key, self.folder)
        return self.folder / key


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # as /proc says; no object is missing
        raise PermissionError(error.errno, error.strerror) from None
