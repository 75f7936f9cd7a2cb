"""Finds and opens the results of runs in a bucket, in another store that fsspec knows, or on a disk of all hosts.

For a bucket, only the environment says where the store is and who may use it: the AWS_* variables (AWS_ENDPOINT_URL,
AWS_REGION, AWS_ACCESS_KEY_ID ...), a profile, or the role of the machine. For another store, it is the settings of
fsspec (FSSPEC_SFTP_PASSWORD ...). The config holds none of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast
from urllib.parse import unquote, urlsplit

from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.base import NoBucketError, OtherRegionError, Store, WritableStore
from ddp_hydra.storage.files import passing
from ddp_hydra.storage.fsspec_schemes import is_known
from ddp_hydra.storage.fsspec_store import FsspecStore
from ddp_hydra.storage.local import LocalFolder
from ddp_hydra.storage.s3 import Bucket

POINTER = "results.url"
"""In the run directory where the command was typed: the URL of the results that are elsewhere."""
_BUCKET_URL = re.compile(r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]{1,62})((?:/[^/?#\\]+)*)/?")
_FSSPEC_URL = re.compile(r"([a-z][a-z0-9]*)://(?:[^/?#\\:@]+@)?[^/?#\\@]*((?:/[^/?#\\]+)*)/?")
_NEVER = ("s3", "gs", "az", "http", "https")


class ResultsFolder:
    """A folder in a store, whose errors say whether trying again may help.

    Its methods raise ConfigError for what only a person can put right, ConnectionError for what may pass, and
    FileNotFoundError if the object to read is not there. It does not retry: its callers do.

    Args:
        url: of the folder, for messages.
        store: the store that it is in.
        prefix: the folder's name in the store; "" for the whole store.
    """

    def __init__(self, url: str, store: WritableStore, prefix: str = "") -> None:
        self.url, self.store, self.prefix = url, store, prefix

    def get(self, key: str) -> bytes:
        """Return the content of a small object."""
        with self._explained(key):
            return bytes(self.store.get(self._key(key)))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` (exclusive) of an object."""
        with self._explained(key):
            return bytes(self.store.get_range(self._key(key), start, end))

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes, None if there is none."""
        with suppress(FileNotFoundError), self._explained(key):
            return self.store.size(self._key(key))
        return None

    def put(self, key: str, content: bytes | IO[bytes], size: int = 0) -> None:
        """Write an object; see `WritableStore`."""
        with self._explained(key, writes=True):
            self.store.put(self._key(key), content, size)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        with self._explained(key, writes=True):
            self.store.delete(self._key(key))

    def objects(self) -> Iterator[tuple[str, int]]:
        """Yield the name below this folder, and the size in bytes, of each object in it.

        Only for a folder from `open_folder`: not all stores that can be written can be listed.
        """
        with self._explained(""):
            for key, size in cast("Store", self.store).objects(self.prefix):
                name = key.removeprefix(self.prefix).lstrip("/")
                if name:
                    yield name, size

    def etag(self, key: str) -> str | None:
        """Return a text that differs for each content of an object, None if there is no object."""
        with self._explained(key):
            return self.store.etag(self._key(key))

    def put_if(self, key: str, content: bytes, etag: str | None) -> str:
        """Write an object if it still has this ETag; see `WritableStore`."""
        with self._explained(key, writes=True):
            return self.store.put_if(self._key(key), content, etag)

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}".lstrip("/")

    @contextmanager
    def _explained(self, key: str, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except (NoBucketError, OtherRegionError) as error:
            raise ConfigError(str(error)) from None
        except ValueError as error:  # an answer of the wrong size
            raise ConnectionError(str(error)) from None
        except OSError as error:
            if error.errno is not None:
                raise self._disk_error(error, key, writes) from None
            if isinstance(error, FileNotFoundError | ConnectionError):
                raise
            kind = ConfigError if isinstance(error, PermissionError) else ConnectionError
            raise kind(str(error)) from None

    def _disk_error(self, error: OSError, key: str, writes: bool) -> Exception:
        message = f"{self.url}/{key}: {error.strerror or error}"
        if isinstance(error, FileNotFoundError) and not writes:
            return FileNotFoundError(message)
        if passing(error):
            return ConnectionError(message)
        return ConfigError(f"{message}: is the disk mounted there, and may its user write it?")


def is_url(text: str) -> bool:
    """Return whether a text is the URL of a store, and not a path."""
    return "://" in text and text.partition("://")[0].isalnum()


def plain_path(text: str) -> str:
    """Return the path of a file:// URL; return any other text unchanged.

    Raises:
        ConfigError: it names another host, or no absolute path.
    """
    if not text.startswith("file://"):
        return text
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"{text}: a folder is given as file:///shared/folder, with three slashes, or as its path")
    return unquote(parts.path)


def open_folder(url: str, timeout_s: float = 60.0) -> ResultsFolder:
    """Return the folder that a URL or an absolute path names. No request is sent yet.

    Args:
        url: "s3://bucket/folder", "sftp://user@host/folder", "file:///shared/folder" or "/shared/folder".
        timeout_s: how long a bucket's connection may stay silent.

    Raises:
        ConfigError: it is none of them, or obstore, or fsspec's package, is not installed.
    """
    path = plain_path(url)
    if Path(path).is_absolute():
        return ResultsFolder(path.rstrip("/"), LocalFolder(path))
    match = _BUCKET_URL.fullmatch(url)
    if match is None or any(part in (".", "..") for part in url.split("/")):
        return _open_by_fsspec(url, timeout_s)
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise ConfigError("buckets need the package obstore: pip install 'ddp-hydra[s3]'") from None
    try:
        bucket = Bucket(
            match[2],
            addressing=None,
            setting=None,
            timeout_s=timeout_s,
            retry_timeout_s=0,
            scheme=match[1],
            client_retries=2,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return ResultsFolder(url.rstrip("/"), bucket, match[3].strip("/"))


def _open_by_fsspec(url: str, timeout_s: float) -> ResultsFolder:
    match = _FSSPEC_URL.fullmatch(url)
    if match is None or any(part in (".", "..") for part in url.split("/")) or match[1] in _NEVER:
        # The message does not show the URL, as it may hold a secret.
        raise ConfigError(
            "a bucket is given as s3://bucket/folder, another store that fsspec knows as sftp://user@host/folder, both "
            "without password, query or empty parts"
        )
    if match[1] == "memory":
        raise ConfigError("memory:// is the memory of one process, and ends with it: give s3://bucket/folder or a path")
    if not is_known(match[1]):
        raise ConfigError(f"{match[1]}:// is not known: give s3://bucket/folder or a URL of fsspec, as sftp://")
    try:
        store = FsspecStore(url, setting=None, timeout_s=timeout_s, retry_timeout_s=0)
    except ModuleNotFoundError as error:
        raise ConfigError(str(error)) from None
    return ResultsFolder(url.rstrip("/"), store)


def address(root: str, run_dir: Path) -> str:
    """Return the URL or path for the results of a run: its folder below the root, without `outputs` or `multirun`.

    Args:
        root: `results.root`.
        run_dir: of the client.

    Raises:
        ConfigError: the root is a relative path, which may differ between hosts.
    """
    root = plain_path(root).rstrip("/")
    if not is_url(root) and not Path(root).is_absolute():
        raise ConfigError(
            f"results.root={root}: give s3://bucket/folder, or the whole path of a folder on a disk that all hosts "
            "share, /shared/runs"
        )
    parts = Path(os.path.relpath(run_dir)).parts
    if not parts or parts[0] == "..":
        parts = run_dir.absolute().parts[-2:]
    elif len(parts) > 1 and parts[0] in ("outputs", "multirun"):
        parts = parts[1:]
    return "/".join((root, *parts))
