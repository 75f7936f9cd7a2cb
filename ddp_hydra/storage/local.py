"""Files in a folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_hydra.storage.counters import Traffic


class LocalFolder:
    """Lists, reads and writes the files below a folder, as if they were the objects of a bucket.

    Args:
        folder: where they are.
        traffic: counts; None: an own one.

    Raises:
        FileNotFoundError: there is no such folder.
    """

    ranges = True

    def __init__(self, folder: str | Path, traffic: Traffic | None = None) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.url = f"file://{self.folder}"
        self.name = str(self.folder)
        self.traffic = traffic or Traffic()

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield path below the folder and size in bytes of each file under `prefix`, links to folders followed.

        Raises:
            FileNotFoundError: there is no such folder.
            PermissionError: a folder may not be read.
        """
        pending = [self.path(prefix)]
        inside = len(str(self.folder)) + 1
        seen = set()
        while pending:
            folder = pending.pop()
            if (real := os.path.realpath(folder)) in seen:
                continue
            seen.add(real)
            try:
                entries = os.scandir(folder)
            except FileNotFoundError:
                if self.folder.is_dir():
                    return
                raise FileNotFoundError(f"there is no folder {self.folder}: check data.bucket=...") from None
            with entries:
                for entry in entries:
                    if entry.is_dir():
                        pending.append(Path(entry.path))
                    elif entry.is_file():
                        yield entry.path[inside:].replace(os.sep, "/"), entry.stat().st_size

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

    def put(self, key: str, content: Any) -> None:
        """Write a file, whole or not at all: bytes, or the path of one to copy."""
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(content.read_bytes() if isinstance(content, Path) else content)
                file.flush()
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

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
