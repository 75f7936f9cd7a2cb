"""Reads files from web servers."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from typing import Any

from ddp_hydra.storage.base import TemporaryError, bare_url
from ddp_hydra.storage.object_store import ObjectStore
from ddp_hydra.storage.s3_messages import cause


class WebServer(ObjectStore):
    """Reads the files of a web server; see `Store`. Its folders can't be listed.

    Args:
        url: scheme and host, e.g. "https://example.org"; a query is sent with each request, as signed URLs need it.
        retrying: arguments of `Store`.
    """

    setting = "data"

    def __init__(self, url: str, **retrying: Any) -> None:
        self.url = url
        super().__init__(**retrying)

    def objects(self, prefix: str = "") -> Any:
        """Refuse: web servers have no listing that programs could rely on."""
        raise ValueError(f"the folders of {self.public_url()} can't be listed: give a bucket, a folder or an index")

    folders = objects

    def _put(self, client: Any, key: str, *_: Any) -> None:
        raise PermissionError(f"{self.public_url()} is a web server, and is only read: give a bucket or a folder")

    _delete = _put

    def _open(self) -> Any:
        from obstore.store import HTTPStore

        return HTTPStore.from_url(self.url, **self._options(self.url))

    def _explain(self, error: Exception, key: str | None) -> Exception:
        if isinstance(error, RuntimeError | ImportError | PermissionError):
            return error
        full = str(error)
        status = (re.findall(r"status code: (\d{3})", full.split("\n\nDebug source")[0]) or [""])[0]
        if isinstance(error, FileNotFoundError):
            status = "404"
        return _error(f"{self.public_url()}/{key}", status, cause(full))


def download(url: str, timeout_s: float) -> bytes:
    """Return the content of a file on a web server.

    It needs no obstore, and takes answers that do not say how long they are, which obstore refuses.

    Args:
        url: starts with http:// or https://.
        timeout_s: how long the connection may stay silent.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: the file may not be read.
        ConnectionError: the server is not reachable, or out of order.
    """
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310 (the callers give web URLs only)
            return response.read()
    except urllib.error.HTTPError as error:
        with error:
            raise _error(bare_url(url), str(error.code), "") from None
    except (OSError, http.client.HTTPException) as error:
        raise _error(bare_url(url), "", f" ({getattr(error, 'reason', None) or error})") from None


def _error(where: str, status: str, reason: str) -> Exception:
    """Return the error for an answer that is not a success.

    Args:
        where: the URL, without secrets.
        status: of the answer; "" where none came.
        reason: why none came, as " (reason)".
    """
    if status in ("404", "410"):
        return FileNotFoundError(f"there is no {where} ({status}): check the URL")
    if status in ("401", "403"):
        return PermissionError(f"{where} may not be read ({status}): check the URL, or that it is still valid")
    if not status:
        return TemporaryError(f"{where} is not reachable{reason}: check the network and the URL")
    kind = TemporaryError if status.startswith("5") or status in ("408", "429") else ConnectionError
    return kind(f"{where} answered {status}: try again later, or check the URL")
