"""Finds and opens the results of runs in a bucket, in another store that fsspec knows, or on a disk of all hosts.

For a bucket, only the environment says where the store is and how to sign in: the AWS_* variables (AWS_ENDPOINT_URL,
AWS_REGION, AWS_ACCESS_KEY_ID ...), a profile, or the role of the machine. For another store, it is the settings of
fsspec (FSSPEC_SFTP_PASSWORD ...). The config holds none of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.base import Store
from ddp_hydra.storage.fsspec_store import FsspecStore, is_known
from ddp_hydra.storage.local import LocalFolder
from ddp_hydra.storage.s3 import Bucket
from ddp_hydra.storage.urls import local_path

POINTER = "results.url"
"""In the run directory where the command was typed: the URL of the results that are elsewhere."""
_URL = re.compile(
    r"(?P<bucket>s3|gs|az)://(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{1,62})(?P<prefix>(/[^/?#\\]+)*)/?"
    r"|(?!(s3|gs|az|https?):)(?P<scheme>[a-z][a-z0-9]*)://([^/?#\\:@]+@)?[^/?#\\@]*(/[^/?#\\]+)*/?"
)


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

    Raises:
        ConfigError: it is none of them, or obstore or fsspec's package is not installed.
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
        raise ConfigError(str(error)) from None


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
            f"results.root={root}: give s3://bucket/folder, or the whole path of a folder that all hosts share"
        )
    parts = Path(os.path.relpath(run_dir)).parts
    if not parts or parts[0] == "..":
        parts = run_dir.absolute().parts[-2:]
    elif len(parts) > 1 and parts[0] in ("outputs", "multirun"):
        parts = parts[1:]
    return "/".join((root, *parts))
