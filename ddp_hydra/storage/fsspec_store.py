"""Reads and writes files by fsspec, whose packages know sftp, hdfs, abfs and many more stores."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_hydra.storage.base import StaleCredentialsError, Store, TemporaryError, check_key
from ddp_hydra.storage.object_store import is_here
from ddp_hydra.storage.s3 import BucketAddress, explain_s3fs

OBJECT_STORES = frozenset(("abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a"))
"""Stores where a file is there whole or not at all."""
_NO_STORES = frozenset((
    "asyncwrapper", "blockcache", "cached", "dir", "filecache", "generic", "reference", "simplecache", "tar", "zip",
    "arrow_local", "git", "libarchive", "local",
))  # fmt: skip
"""Layers above another store, and schemes of this machine."""
_CHANGED = ("ETag", "etag", "mtime", "modified", "LastModified", "last_modified", "updated", "created")
"""What file systems call the part of their information that differs for each content."""
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_STATUSES = ("status", "status_code", "code")
"""What clients call the HTTP status in their errors."""
_REFUSED = re.compile("auth|credential|denied|forbidden|permission", re.IGNORECASE)


class FsspecStore(Store):
    """Lists, reads and writes the files below a URL by fsspec; see `Store`.

    How long a connection may stay silent is up to the package that knows the scheme; see its storage options. On a
    store that can't rename onto a file, as some SFTP servers, a file that is replaced is missing for a moment.

    Args:
        url: the folder or container, e.g. "sftp://user@host/folder" or "abfs://container@account.dfs.core.windows.net".
        options: arguments of fsspec's file system for this scheme, as pandas and Dask take them, "storage options".
            What is missing comes from fsspec's own settings: FSSPEC_<SCHEME>_<OPTION> in the environment.
        setting: see `Store`.
        bucket: of an "s3" URL: where it is and how to sign in. s3fs takes what botocore takes: profiles with single
            sign-on (`aws sso login`), credential processes, and, with requester_pays, buckets whose readers pay.
        retrying: arguments of `Store`: timeout_s, retry_timeout_s and traffic.

    Raises:
        ModuleNotFoundError: fsspec's package for this scheme is not installed.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        setting: str | None = "data.bucket",
        bucket: BucketAddress | None = None,
        **retrying: Any,
    ) -> None:
        self.scheme, _, place = url.partition("://")
        self.url = f"{self.scheme}://{place.rstrip('/')}"
        self.options = dict(options or {})
        self.setting, self.bucket = setting, bucket
        self.endpoint_url = None if bucket is None else bucket.endpoint_url
        self._inside = ""  # what stands before each key in the file system's own paths; `_open` knows it
        check_installed(self.scheme)
        super().__init__(**retrying)

    def _set_process_state(self) -> None:
        super()._set_process_state()
        self._of_threads = threading.local()
        self._taken: Any = None

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield key and size in bytes of each file below a folder: of all of them, or an error; see `Store`."""
        yield from self._request(lambda fs: self._listed(fs, prefix), None, first=True)

    def _listed(self, fs: Any, prefix: str) -> list[tuple[str, int]]:
        found = self._list(fs, prefix)
        # s3fs takes an error document, and a lost page, for the end: two answers must agree.
        if self.bucket and self._list(fs, prefix) != found:
            raise TemporaryError(f"{self.url} lists its objects differently each time: try again later")
        if self.bucket and not found:
            self._check_answers(fs, prefix)
        return found

    def _list(self, fs: Any, prefix: str) -> list[tuple[str, int]]:
        top, inside = self._path(prefix).strip("/"), len(self._inside.lstrip("/"))
        named = ((info["name"].strip("/"), int(info["size"] or 0)) for info in self._files(fs, prefix))
        return [(name[inside:], size) for name, size in named if name != top]

    def _files(self, fs: Any, prefix: str) -> Iterator[Mapping[str, Any]]:
        fs.invalidate_cache()
        if self.bucket:  # s3fs lists all folders at once, and raises what goes wrong
            yield from fs.find(self._path(prefix), detail=True).values()
            return
        pending = [self._path(prefix)]
        try:
            while pending:
                # fsspec's `find` and `walk` would leave out what they can't read.
                folder = pending.pop()
                for info in fs.ls(folder, detail=True):
                    if info["type"] != "directory":
                        yield info
                    elif info["name"].strip("/") != folder.strip("/"):
                        pending.append(info["name"])
        except FileNotFoundError:
            if not prefix or not fs.exists(self._path("")):
                raise

    def _get(self, fs: Any, key: str, size: int | None) -> bytes:
        content: bytes = fs.cat_file(self._path(key))
        if size is not None and len(content) != size and self._size(fs, key) != len(content):
            raise self._wrong_body(key, len(content), size)
        return content

    def _get_range(self, fs: Any, key: str, start: int, end: int) -> bytes:
        content: bytes = fs.cat_file(self._path(key), start=start, end=end) if end > start else b""
        if len(content) != end - start:
            raise self._wrong_body(key, len(content), end - start)
        return content

    def _size(self, fs: Any, key: str) -> int:
        return int(self._info(fs, key)["size"])

    def _folders(self, fs: Any, prefix: str) -> list[str]:
        fs.invalidate_cache()
        top = self._path(prefix)
        try:
            found = fs.ls(top, detail=True)
        except FileNotFoundError:
            return []
        paths = (info["name"].strip("/") for info in found if info["type"] == "directory")
        return sorted(path.rpartition("/")[2] for path in paths if path != top.strip("/"))

    def _put(self, fs: Any, key: str, content: Any) -> None:
        write = _write if self.scheme in OBJECT_STORES else _replace
        try:
            write(fs, self._path(key), content)
        except NotImplementedError:
            raise PermissionError(f"fsspec only reads {self.scheme}://") from None

    def _delete(self, fs: Any, key: str) -> None:
        fs.rm_file(self._path(key))

    def _etag(self, fs: Any, key: str) -> str:
        info = self._info(fs, key)
        return f"{next((info[name] for name in _CHANGED if info.get(name)), '')}-{info['size']}"

    def _info(self, fs: Any, key: str) -> Mapping[str, Any]:
        fs.invalidate_cache()
        found: Mapping[str, Any] = fs.info(self._path(key))
        if found["type"] == "directory":
            raise IsADirectoryError(key)
        return found

    def _path(self, key: str) -> str:
        """Return the file system's own path of a key, whose characters are taken as they are; "": of the whole."""
        check_key(key)
        return f"{self._inside}{key}" if key else self._inside.rstrip("/") or self._inside

    def _client(self) -> Any:
        opened = super()._client()
        if opened.async_impl:
            return opened
        # Most other file systems have one connection, which one thread may use.
        mine = getattr(self._of_threads, "opened", None)
        if mine is None or mine[0] is not opened:
            with self._opening:
                is_free, self._taken = self._taken is not opened, opened
            self._of_threads.opened = mine = (opened, opened if is_free else self._open())
        return mine[1]

    def _open(self) -> Any:
        from fsspec import config
        from fsspec.core import url_to_fs

        config.set_conf_env(config.conf)  # as it is now: a rank is the fork of a process that has imported fsspec
        options = s3fs_options(self.bucket, self.timeout_s) | self.options if self.bucket else self.options
        try:
            fs, path = url_to_fs(f"{self.url}/x", skip_instance_cache=True, **options)
        except (TypeError, ValueError) as error:
            client = "s3fs" if self.bucket else "fsspec"
            raise ValueError(f"{client} can't open {self.public_url()}: {error}; check {self._typed()}") from None
        if self.bucket:
            fs.retries = 1
        self._inside = path[:-1]
        return fs

    def _explain(self, error: Exception, key: str | None) -> Exception:
        if isinstance(error, RuntimeError | ImportError | TypeError | ValueError):
            return error
        if self.bucket:
            return explain_s3fs(error, self.bucket, key)
        where = f"{self.public_url()}/{key}" if key else self.public_url()
        if isinstance(error, _NO_FILE):
            return FileNotFoundError(f"there is no {'file' if key else 'folder'} {where}: check {self._typed()}")
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        status = next((found for name in _STATUSES if (found := getattr(error, name, None))), None)
        is_refused = status in (401, 403) or _REFUSED.search(type(error).__name__)
        if is_refused or isinstance(error, PermissionError):
            return (StaleCredentialsError if status == 401 else PermissionError)(
                f"{where} was refused ({reason}): check the user and the rights; fsspec takes credentials from "
                f"FSSPEC_{self.scheme.upper()}_... in the environment (of the workers, too)"
            )
        self._opened = None  # connect anew
        return TemporaryError(f"{where} can't be reached ({reason}): check the network and {self._typed()}")

    def _typed(self) -> str:
        return f"{self.setting}=... and data.storage_options" if self.setting else "the URL"


def _write(fs: Any, path: str, content: Any) -> None:
    if not hasattr(content, "read"):
        fs.pipe_file(path, bytes(content))
        return
    content.seek(0)
    if Path(name := str(getattr(content, "name", ""))).is_file():
        fs.put_file(name, path)
    else:
        fs.pipe_file(path, content.read())


def _replace(fs: Any, path: str, content: Any) -> None:
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


def s3fs_options(bucket: BucketAddress, timeout_s: float) -> dict[str, Any]:
    """Return the arguments of `s3fs.S3FileSystem` for a bucket. It does not retry by itself, as `Store` does that."""
    config: dict[str, Any] = {
        "connect_timeout": 3,
        "read_timeout": timeout_s,
        "retries": {"max_attempts": 0},
        "max_pool_connections": 64,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    if bucket.addressing is not None:
        config["s3"] = {"addressing_style": bucket.addressing}
    if is_here(bucket.endpoint_url or ""):
        config["proxies"] = {}  # a proxy can't reach this machine
    region = bucket.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    key, secret = bucket.credentials or (None, None)
    return {
        "anon": bucket.anon,
        "key": key,
        "secret": secret,
        "endpoint_url": bucket.endpoint_url,
        "client_kwargs": {"region_name": region or "us-east-1"},
        "config_kwargs": config,
        "use_listings_cache": False,
        "max_concurrency": 1,  # more would ask for the size of each object before it is read
    }


def is_known(scheme: str) -> bool:
    """Return whether fsspec knows a scheme, and it is one of a store: no layer above another, nor of this machine."""
    from fsspec import available_protocols, registry

    return (scheme in available_protocols() or scheme in registry) and scheme not in _NO_STORES


def check_installed(scheme: str) -> None:
    """Raise ModuleNotFoundError if fsspec's package for a scheme is not installed."""
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        raise ModuleNotFoundError(f"{scheme}:// needs another package, here and on the workers: {error}") from None
