"""Reads and writes files by fsspec, whose packages know sftp, hdfs, abfs and many more stores."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ddp_hydra.storage.base import TemporaryError
from ddp_hydra.storage.fsspec_schemes import OBJECT_STORES, check_installed
from ddp_hydra.storage.retrying import Retrying

_PIECE_BYTES = 8 * 2**20
_CHANGED = ("ETag", "etag", "mtime", "modified", "LastModified", "last_modified", "updated", "created")
"""What file systems call the part of their information that differs for each content."""
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_REFUSED = re.compile("auth|credential|denied|forbidden|permission", re.IGNORECASE)


class Opened(NamedTuple):
    """A file system of fsspec, and what stands before each key in its own paths."""

    fs: Any
    inside: str

    def path(self, key: str) -> str:
        """Return the file system's own path of a key, whose characters are taken as they are; "": of the whole.

        Raises:
            ValueError: the key would lead out of the URL.
        """
        if key.startswith("/") or ".." in key.split("/"):
            raise ValueError(f"{key!r} leads out of its store: give paths below it, without '..'")
        return f"{self.inside}{key}" if key else self.inside.rstrip("/") or self.inside


class FsspecStore(Retrying):
    """Lists, reads and writes the files below a URL by fsspec; see `Retrying`.

    How long a connection may stay silent is up to the package that knows the scheme; see its storage options. On a
    store that can't rename onto a file, as some SFTP servers, a file that is replaced is missing for a moment.

    Args:
        url: the folder or container, e.g. "sftp://user@host/folder" or "abfs://container@account.dfs.core.windows.net".
        options: arguments of fsspec's file system for this scheme, as pandas and Dask take them, "storage options".
            What is missing comes from fsspec's own settings: FSSPEC_<SCHEME>_<OPTION> in the environment.
        setting: the config key that names the URL, for messages; None: `results.root` or the like.
        retrying: arguments of `Retrying`: timeout_s, retry_timeout_s and traffic.

    Raises:
        ModuleNotFoundError: fsspec, or its package for this scheme, is not installed.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        setting: str | None = "data.bucket",
        **retrying: Any,
    ) -> None:
        self.scheme, _, place = url.partition("://")
        self.url = f"{self.scheme}://{place.rstrip('/')}"
        self.options = dict(options or {})
        self.setting = setting
        check_installed(self.scheme)
        super().__init__(**retrying)

    def _reset(self) -> None:
        super()._reset()
        self._pid = os.getpid()
        self._of_threads = threading.local()
        self._taken: Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_pid", "_of_threads", "_taken")
        return {name: value for name, value in super().__getstate__().items() if name not in mine}

    def stream(self, key: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield a file in pieces, from a byte on; raises as `get`."""
        for begin in range(start, size, _PIECE_BYTES):
            yield self.get_range(key, begin, min(begin + _PIECE_BYTES, size))

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """List the files under a folder, with all folders in it: all of them, or an error.

        Args:
            prefix: the folder; "" for all.

        Yields:
            Path below the URL, and size in bytes.

        Raises:
            FileNotFoundError: there is no such place.
            Exception: as `get`.
        """
        yield from self._request(lambda at: self._list(at, prefix), None, first=True)

    def _list(self, at: Opened, prefix: str) -> list[tuple[str, int]]:
        top, inside = at.path(prefix).strip("/"), len(at.inside.lstrip("/"))
        named = ((info["name"].strip("/"), int(info["size"] or 0)) for info in self._files(at, prefix))
        return [(name[inside:], size) for name, size in named if name != top]

    def _files(self, at: Opened, prefix: str) -> Iterator[Mapping[str, Any]]:
        at.fs.invalidate_cache()
        pending = [at.path(prefix)]
        try:
            while pending:
                # fsspec's `find` and `walk` would leave out what they can't read.
                folder = pending.pop()
                for info in at.fs.ls(folder, detail=True):
                    if info["type"] != "directory":
                        yield info
                    elif info["name"].strip("/") != folder.strip("/"):
                        pending.append(info["name"])
        except FileNotFoundError:
            if not prefix or not at.fs.exists(at.path("")):
                raise

    def _get(self, at: Opened, key: str, size: int | None) -> bytes:
        content = self._content(at, key)
        if size is not None and len(content) != size and self._size(at, key) != len(content):
            raise self._wrong_body(key, len(content), size)
        return content

    def _content(self, at: Opened, key: str) -> bytes:
        content: bytes = at.fs.cat_file(at.path(key))
        return content

    def _get_range(self, at: Opened, key: str, start: int, end: int) -> bytes:
        content: bytes = at.fs.cat_file(at.path(key), start=start, end=end) if end > start else b""
        if len(content) != end - start:
            raise self._wrong_body(key, len(content), end - start)
        return content

    def _size(self, at: Opened, key: str) -> int:
        return int(_info(at, key)["size"])

    def _folders(self, at: Opened, prefix: str) -> list[str]:
        at.fs.invalidate_cache()
        top = at.path(prefix)
        try:
            found = at.fs.ls(top, detail=True)
        except FileNotFoundError:
            return []
        paths = (info["name"].strip("/") for info in found if info["type"] == "directory")
        return sorted(path.rpartition("/")[2] for path in paths if path != top.strip("/"))

    def _put(self, at: Opened, key: str, content: Any, size: int) -> None:
        write = _write if self.scheme in OBJECT_STORES else _replace
        try:
            write(at.fs, at.path(key), content)
        except NotImplementedError:
            raise PermissionError(f"fsspec only reads {self.scheme}://") from None

    def _delete(self, at: Opened, key: str) -> None:
        at.fs.rm_file(at.path(key))

    def _etag(self, at: Opened, key: str) -> str:
        info = _info(at, key)
        return f"{next((info[name] for name in _CHANGED if info.get(name)), '')}-{info['size']}"

    def put_if(self, key: str, content: bytes, etag: str | None) -> str:
        """Refuse with NotImplementedError, as fsspec has no conditional writes."""
        raise NotImplementedError

    def shown(self) -> str:
        """Return the URL without a password in it."""
        return without_password(self.url)

    def _store(self) -> Opened:
        if self._pid != os.getpid():  # this process was forked
            self._reset()
        opened: Opened = super()._store()
        if opened.fs.async_impl:
            return opened
        # Most other file systems have one connection, which one thread may use.
        mine = getattr(self._of_threads, "opened", None)
        if mine is None or mine[0] is not opened:
            with self._opening:
                is_free, self._taken = self._taken is not opened, opened
            self._of_threads.opened = mine = (opened, opened if is_free else self._open())
        return mine[1]

    def _open(self) -> Opened:
        from fsspec import config
        from fsspec.core import url_to_fs

        config.set_conf_env(config.conf)  # as it is now: a rank is the fork of a process that has imported fsspec
        try:
            fs, path = url_to_fs(f"{self.url}/x", skip_instance_cache=True, **self.options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"fsspec can't open {self.shown()}: {error}; check {self._typed()}") from None
        return Opened(fs, path[:-1])

    def _explain(self, error: Exception, key: str | None) -> Exception:
        if isinstance(error, RuntimeError | ImportError | TypeError | ValueError):
            return error
        where = f"{self.shown()}/{key}" if key else self.shown()
        if isinstance(error, _NO_FILE):
            return FileNotFoundError(f"there is no {'file' if key else 'folder'} {where}: check {self._typed()}")
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        if _is_refusal(error):
            return PermissionError(
                f"{where} was refused ({reason}): check the user and the rights; fsspec takes credentials from "
                f"FSSPEC_{self.scheme.upper()}_... in the environment (of the workers, too)"
            )
        self._opened = None  # connect anew
        return TemporaryError(f"{where} can't be reached ({reason}): check the network and {self._typed()}")

    def _typed(self) -> str:
        return f"{self.setting}=... and data.storage_options" if self.setting else "the URL"


def _info(at: Opened, key: str) -> Mapping[str, Any]:
    at.fs.invalidate_cache()
    found: Mapping[str, Any] = at.fs.info(at.path(key))
    if found["type"] == "directory":
        raise IsADirectoryError(key)
    return found


def _write(fs: Any, path: str, content: Any) -> None:
    if isinstance(content, Path):
        fs.put_file(str(content), path)
    elif not hasattr(content, "read"):
        fs.pipe_file(path, bytes(content))
    elif Path(name := str(getattr(content, "name", ""))).is_file():
        fs.put_file(name, path)
    else:
        content.seek(0)
        fs.pipe_file(path, content.read())


def _replace(fs: Any, path: str, content: Any) -> None:
    """Write a file under another name, and rename it."""
    folder, slash, name = path.rpartition("/")
    part = f"{folder}{slash}.{name[:100]}.{secrets.token_hex(4)}.part"
    if folder:
        fs.makedirs(folder, exist_ok=True)
    try:
        _write(fs, part, content)
        try:
            fs.mv(part, path)
        except OSError:  # a store that does not rename onto a file that is there
            fs.rm_file(path)
            fs.mv(part, path)
    except BaseException:
        with suppress(Exception):
            fs.rm_file(part)
        raise


def _is_refusal(error: Exception) -> bool:
    status = next((getattr(error, name, None) for name in ("status", "status_code", "code")), None)
    return isinstance(error, PermissionError) or status in (401, 403) or bool(_REFUSED.search(type(error).__name__))


def without_password(url: str) -> str:
    """Return a URL without the password in it."""
    return re.sub(r"//([^/@:]*):[^/@]*@", r"//\1@", url)
