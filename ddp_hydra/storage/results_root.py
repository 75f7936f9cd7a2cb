"""Where results lie that no client holds: a folder of a bucket, or of a disk that all hosts share."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import unquote, urlsplit

from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.bucket import Changed, Folder
from ddp_hydra.storage.files import commit, part_of, passing

LOCK = ".lock"
POINTER = "results.url"
"""In the run directory where the command was typed: the URL of the results that are elsewhere."""


class Store(Protocol):
    """A folder of named objects, each of which is there whole or not at all.

    All of it raises ConfigError for what only a person can put right, ConnectionError for what may pass, and
    FileNotFoundError where an object that is asked for is not there.
    """

    url: str

    def get(self, name: str) -> bytes:
        """Return the content of a small object."""

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return some bytes of an object."""

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, None if there is none."""

    def put(self, name: str, content: bytes | IO[bytes], size: int = 0) -> None:
        """Put an object there, replacing an older one at the moment when it is complete."""

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""

    def tag(self, name: str) -> str | None:
        """Return what tells this content of an object from others, None if there is no object."""

    def put_if(self, name: str, content: bytes, tag: str | None) -> str:
        """Put an object there where it is still the one of a tag, None: where there is none; returns the new tag.

        Raises:
            Changed: it is another.
            NotImplementedError: the store takes no conditions.
        """


class Disk:
    """A folder of a disk, as a store.

    Args:
        path: absolute; made when something is put there.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.url = str(path).rstrip("/")

    def get(self, name: str) -> bytes:
        """Return the content of a file."""
        with self._explained(name):
            return (self._path / name).read_bytes()

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return some bytes of a file."""
        with self._explained(name), (self._path / name).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, None if there is none."""
        with suppress(FileNotFoundError), self._explained(name):
            return (self._path / name).stat().st_size
        return None

    def put(self, name: str, content: bytes | IO[bytes], size: int = 0) -> None:
        """Write a file under another name, then give it its own."""
        target = self._path / name
        with self._explained(name, writes=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            part = part_of(target)
            try:
                with part.open("wb") as file:
                    if isinstance(content, bytes):
                        file.write(content)
                    else:
                        shutil.copyfileobj(content, file, 2**20)
                commit(part, target)
            finally:
                part.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._explained(name):
            (self._path / name).unlink(missing_ok=True)

    def tag(self, name: str) -> str | None:
        """Return what tells this content of a file from others, None if there is no file."""
        with suppress(FileNotFoundError), self._explained(name):
            found = (self._path / name).stat()
            return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
        return None

    def put_if(self, name: str, content: bytes, tag: str | None) -> str:
        """Replace a file where it is still the one of a tag, None: make it where there is none; returns the new tag.

        Raises:
            Changed: it is another.
        """
        with self._locked():
            if self.tag(name) != tag:
                raise Changed(name)
            self.put(name, content)
            return str(self.tag(name))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep others from changing files here meanwhile, on all hosts where the disk has locks (NFS 4 has)."""
        with self._explained(LOCK, writes=True):
            self._path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # without locks, it is as good as it can be
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def _explained(self, name: str, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            said = f"{self.url}/{name}: {error.strerror or error}"
            if isinstance(error, FileNotFoundError) and not writes:
                raise FileNotFoundError(said) from None
            if passing(error):
                raise ConnectionError(said) from None
            raise ConfigError(f"{said}: is the disk mounted there, and may its user write it?") from None


def is_url(text: str) -> bool:
    """Whether results are given by the URL of a bucket, not by a path."""
    return "://" in text and text.partition("://")[0].isalnum()


def plain_path(text: str) -> str:
    """`file:///shared/runs` as the path that it is; anything else as it was given.

    Raises:
        ConfigError: it names another host, or no absolute path.
    """
    if not text.startswith("file://"):
        return text
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"{text}: a folder is given as file:///shared/folder, with three slashes, or as its path")
    return unquote(parts.path)


def folder(url: str, timeout_s: float = 60.0) -> Store:
    """Return the store of a URL or an absolute path. Nothing is asked of it yet.

    Args:
        url: "s3://bucket/folder", "file:///shared/folder" or "/shared/folder".
        timeout_s: of one request to a bucket.

    Raises:
        ConfigError: it is none of them, or obstore is not installed.
    """
    path = plain_path(url)
    return Disk(path) if Path(path).is_absolute() else Folder(url, timeout_s)


def find(run: str) -> str:
    """Where the results of a run are that somebody names.

    Args:
        run: a URL, a path, or a run directory that only points to them.

    Raises:
        ConfigError: see `plain_path`.
    """
    path = plain_path(run)
    if not is_url(path):
        with suppress(OSError):
            return (Path(path) / POINTER).read_text().strip()
    return path


def address(root: str, run_dir: Path) -> str:
    """Where the results of a run go: its folder, without `outputs` or `multirun`, below the root.

    Args:
        root: `results.root`.
        run_dir: of the client.

    Raises:
        ConfigError: the root cannot mean the same on every host.
    """
    root = plain_path(root).rstrip("/")
    if not is_url(root) and not Path(root).is_absolute():
        raise ConfigError(
            f"results.root={root}: give s3://bucket/folder, or the whole path of a folder on a disk that all hosts "
            "share, /shared/runs"
        )
    parts = Path(os.path.relpath(run_dir)).parts
    if parts[0] == "..":
        parts = run_dir.absolute().parts[-2:]
    elif len(parts) > 1 and parts[0] in ("outputs", "multirun"):
        parts = parts[1:]
    return "/".join((root, *parts))
