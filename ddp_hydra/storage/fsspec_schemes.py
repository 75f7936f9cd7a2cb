"""Knows the schemes of fsspec's URLs."""

from __future__ import annotations

OBJECT_STORES = frozenset(("abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a"))
"""Stores where a file is there whole or not at all."""
_NO_STORES = frozenset((
    "asyncwrapper", "blockcache", "cached", "dir", "filecache", "generic", "reference", "simplecache", "tar", "zip",
    "arrow_local", "git", "libarchive", "local",
))  # fmt: skip
"""Layers above another store, and schemes of this machine."""


def is_known(scheme: str) -> bool:
    """Return whether fsspec knows a scheme, and it is one of a store: no layer above another, nor of this machine."""
    try:
        from fsspec import available_protocols, registry
    except ImportError:
        return True  # opening it says what to install
    return (scheme in available_protocols() or scheme in registry) and scheme not in _NO_STORES


def check_installed(scheme: str) -> None:
    """Check that fsspec and its package for a scheme are installed.

    Raises:
        ModuleNotFoundError: one of them is not.
    """
    try:
        from fsspec import get_filesystem_class
    except ImportError:
        raise ModuleNotFoundError(
            f"{scheme}:// needs the package fsspec, here and on the workers: pip install 'ddp-hydra[fs]'"
        ) from None
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        raise ModuleNotFoundError(f"{scheme}:// needs another package, here and on the workers: {error}") from None
