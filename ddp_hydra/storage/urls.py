"""Finds the store that a URL belongs to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ddp_hydra.console.text import expanded
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.base import Store, TransferCounters
from ddp_hydra.storage.fsspec_store import FsspecStore, check_installed, is_known
from ddp_hydra.storage.local import LocalFolder
from ddp_hydra.storage.object_store import WebServer
from ddp_hydra.storage.s3 import Bucket, BucketAddress, check_name, endpoint_of

CLIENTS = ("obstore", "s3fs")
_BUCKETS = ("s3", "gs", "az")
FORMATS = ("parquet", "json", "csv", "text", "arrow", "webdataset")
"""Formats of files that `datasets` reads, which stand in the place of a name on the hub."""


@dataclass
class Access:
    """Opens URLs. All URLs of one bucket or host share one store and its connections.

    Args:
        endpoint_url: of s3:// URLs; None: as the environment says, else AWS.
        region: of s3:// URLs.
        anon: read s3:// URLs without credentials.
        addressing: of s3:// URLs, "path" or "virtual".
        setting: the config key that holds the URL, for messages.
        timeout_s: how long a connection may stay silent.
        retry_timeout_s: how long to retry a request.
        credentials: access key and secret of s3:// URLs that are nobody's secret, as the embedded store's.
        client: what reads s3:// URLs, "obstore" or "s3fs".
        storage_options: arguments of fsspec's file system, for s3fs and for schemes that obstore does not know.
        traffic: counts over all stores.

    Raises:
        ValueError: there is no such client.
        ModuleNotFoundError: s3fs is not installed.
    """

    endpoint_url: str | None = None
    region: str | None = None
    anon: bool = False
    addressing: str = "path"
    setting: str = "data.bucket"
    timeout_s: float = 10.0
    retry_timeout_s: float = 60.0
    credentials: tuple[str, str] | None = None
    client: str = "obstore"
    storage_options: Mapping[str, Any] | None = None
    traffic: TransferCounters = field(default_factory=TransferCounters)
    _stores: dict[str, Store] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.client not in CLIENTS:
            raise ValueError(f"client is {self.client!r}, and is {' or '.join(CLIENTS)}: type data.client=obstore")
        if self.client == "s3fs":
            check_installed("s3")

    def open(self, url: str) -> tuple[Store, str]:
        """Return the store of a URL, and its key there.

        Args:
            url: s3://bucket/key, gs:// or az:// as well, http(s)://host/path, file:///path, a path, or a URL of fsspec;
                a scheme in lower case.
        """
        scheme, is_url, rest = url.partition("://")
        if not is_url or scheme == "file":
            path = local_path(url)
            return self._store(f"file://{path.parent}"), path.name
        if scheme in ("http", "https"):
            parts = urlsplit(url)
            query = f"?{parts.query}" if parts.query else ""
            return self._store(f"{parts.scheme}://{parts.netloc}/{query}"), unquote(parts.path).lstrip("/")
        _check_scheme(scheme, self.setting)
        bucket, _, key = rest.partition("/")
        return self._store(f"{scheme}://{bucket}"), key.strip("/")

    def open_folder(self, url: str) -> tuple[Store, str]:
        """Return the store of a folder, and its prefix there: of a local folder, a store of its own and ""."""
        if is_remote(url):
            return self.open(url)
        return self._store(f"file://{local_path(url)}"), ""

    def endpoint(self, url: str) -> str | None:
        """Return the endpoint of an s3:// URL; None: AWS, or another URL. Caches need it: stores may share a URL."""
        return endpoint_of(self.endpoint_url) if url.startswith("s3://") else None

    def bucket(self, name: str) -> Store:
        """Return a whole store by its name, as in `root_of`; raises as that."""
        return self._store(root_of(name, self.setting))

    def _store(self, root: str) -> Store:
        return self._stores.get(root) or self._stores.setdefault(root, self._connect(root))

    def _connect(self, root: str) -> Store:
        if root.startswith("file://"):
            return LocalFolder(root.removeprefix("file://"), self.traffic, self.setting)
        retrying: dict[str, Any] = {name: getattr(self, name) for name in ("timeout_s", "retry_timeout_s", "traffic")}
        if root.startswith(("http://", "https://")):
            return WebServer(root, **retrying)
        scheme, _, name = root.partition("://")
        if scheme not in _BUCKETS:
            return FsspecStore(root, self.storage_options, self.setting, **retrying)
        own = ("endpoint_url", "region", "anon", "addressing", "credentials", "setting")
        arguments: dict[str, Any] = {name: getattr(self, name) for name in own}
        if scheme == "s3" and self.client == "s3fs":
            bucket = BucketAddress(name, **arguments)
            return FsspecStore(root, self.storage_options, self.setting, bucket, **retrying)
        return Bucket(name, **arguments, **retrying, scheme=scheme)

    def close(self) -> None:
        """End all waiting for retries."""
        for store in self._stores.values():
            store.close()


def root_of(name: str, setting: str = "data.bucket") -> str:
    """Return the URL of a whole store. Only the words are looked at.

    Args:
        name: of a bucket, with s3://, gs:// or az:// in front or without; a local folder, whose path has a slash or
            begins with a dot or "~"; file:///folder; or a URL of fsspec.
        setting: the config key that holds it, for messages.
    """
    if "\\" in name:
        raise ValueError(f"{name!r} has backslashes: write the path of a folder with slashes, {setting}=...")
    scheme, is_url, rest = name.partition("://")
    if name.startswith("file:") or (
        not is_url and ("/" in name or name.startswith(("~", "./")) or name in (".", ".."))
    ):
        return f"file://{local_path(name)}"
    if is_url and scheme not in (*_BUCKETS, "http", "https"):
        _check_scheme(scheme, setting)
        return name.rstrip("/")
    is_bucket = is_url and scheme in _BUCKETS
    scheme = scheme if is_bucket else "s3"
    bucket, _, prefix = rest.rstrip("/").partition("/") if is_bucket else (name, "", "")
    if prefix:
        raise ValueError(
            f"{name!r} is a folder in a bucket: type {setting}={scheme}://{bucket} data.train_prefix={prefix}"
        )
    check_name(bucket, setting)
    return f"{scheme}://{bucket}"


def _check_scheme(scheme: str, setting: str) -> None:
    if scheme not in _BUCKETS and not is_known(scheme):
        raise ValueError(
            f"{scheme}:// is not known: give s3://bucket/key, a path, or a URL of http or fsspec: {setting}=..."
        )


def is_remote(url: str) -> bool:
    """Return whether a URL names a store, and not a path of this machine."""
    return "://" in url and not url.startswith("file://")


def as_text(given: Any) -> Any:
    """Return a path as text, and a list with its paths as text; another value as it is."""
    if isinstance(given, os.PathLike):
        return os.fspath(given)
    return [as_text(one) for one in given] if isinstance(given, Sequence) and not isinstance(given, str) else given


def local_path(url: str) -> Path:
    """Return the absolute path of a file:// URL of this machine, or of a path."""
    if not url.startswith("file:"):
        return expanded(url).absolute()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        path = f"{parts.netloc}{parts.path}"
        raise ValueError(
            f"{url!r} is no URL of a file, which has a whole path, file:///folder: for a relative one type {path}"
        )
    return Path(os.path.normpath(unquote(parts.path)))


POINTER = "results.url"
"""In the run directory where the command was typed: the URL of the results in a store."""
_URL = re.compile(
    r"(?P<bucket>s3|gs|az)://(?P<name>[^/?#\\:@]+)(?P<prefix>(/[^/?#\\]+)*)/?"
    r"|(?!(s3|gs|az|https?):)(?P<scheme>[a-z][a-z0-9]*)://([^/?#\\:@]+@)?[^/?#\\@]*(/[^/?#\\]+)*/?"
)


def is_url(text: str) -> bool:
    """Return whether a text is the URL of a store, and not a path."""
    return "://" in text and text.partition("://")[0].isalnum()


def plain_path(text: str) -> str:
    """Return the path of a file:// URL of this machine, or a path whose `~` is the home folder; another URL as is."""
    if not text.startswith("file://"):
        return os.path.expanduser(text)  # noqa: PTH111, a path would lose the slash at the end, and one of two of a URL
    try:
        return str(local_path(text))
    except ValueError:
        raise ConfigError(f"{text}: give file:///shared/folder, with three slashes, or the folder's path") from None


def open_folder(url: str, timeout_s: float = 60.0, retry_timeout_s: float = 0.0) -> Store:
    """Return the folder that a URL or an absolute path names, as a store of results. No request is sent yet.

    Args:
        url: "s3://bucket/folder", "sftp://user@host/folder", "file:///shared/folder" or "/shared/folder".
        timeout_s: how long a bucket's connection may stay silent.
        retry_timeout_s: how long to retry a request; 0: the caller does so.
    """
    path = plain_path(url)
    if Path(path).is_absolute():
        return LocalFolder(path, setting=None, retry_timeout_s=retry_timeout_s)
    match = _URL.fullmatch(url)
    if match is None or any(part in (".", "..") for part in url.split("/")):
        # The message does not show the URL, as it may hold a secret.
        raise ConfigError(
            "a bucket is given as s3://bucket/folder, another store that fsspec knows as sftp://user@host/folder, both "
            "without password, query or empty parts"
        )
    waits: dict[str, Any] = {"timeout_s": timeout_s, "retry_timeout_s": retry_timeout_s}
    if scheme := match["scheme"]:
        if scheme == "memory" or not is_known(scheme):
            why = "is the memory of one process" if scheme == "memory" else "is not known"
            raise ConfigError(f"{scheme}:// {why}: give s3://bucket/folder, a path, or a URL of fsspec, as sftp://")
        try:
            return FsspecStore(url, setting=None, **waits)
        except ModuleNotFoundError as error:
            raise ConfigError(str(error)) from None
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise ConfigError("buckets need the package obstore: pip install 'ddp-hydra[s3]'") from None
    place: dict[str, Any] = {"scheme": match["bucket"], "prefix": match["prefix"].strip("/"), "setting": None}
    try:
        return Bucket(match["name"], addressing=None, client_retries=2, **place, **waits)
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from None


def address(root: str, run_dir: Path) -> str:
    """Return the URL or path for the results of a run: its folder below the root, without `outputs` or `multirun`.

    Args:
        root: `results.root`.
        run_dir: of the client.
    """
    root = plain_path(root).rstrip("/")
    if not is_url(root) and not Path(root).is_absolute():
        raise ConfigError(
            f"results.root={root}: give s3://bucket/folder, or the whole path of a folder that all hosts share"
        )
    parts = Path(os.path.relpath(run_dir)).parts
    if not parts or parts[0] == "..":
        parts = run_dir.absolute().parts[-2:]
    elif len(parts) > 1 and parts[0] in ("outputs", "multirun"):
        parts = parts[1:]
    place = "/".join((root, *parts))
    if not is_url(root) and os.path.realpath(place) == os.path.realpath(run_dir):
        raise ConfigError(f"results.root={root}: {place} is the command's own run directory: give another folder")
    return place
