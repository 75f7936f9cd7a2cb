"""Files on a web server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ddp_hydra.storage.base import TemporaryError
from ddp_hydra.storage.counters import Traffic
from ddp_hydra.storage.remote import Remote
from ddp_hydra.storage.s3_messages import cause


class WebServer(Remote):
    """Reads the files of a web server; see `Remote`. Its folders can't be listed.

    Args:
        url: scheme and host, e.g. "https://example.org"; a query is sent with each request, as signed URLs need it.
        timeout_s: how long a connection may stay silent.
        retry_timeout_s: how long a read is tried again.
        traffic: counts; None: an own one.
    """

    def __init__(
        self, url: str, timeout_s: float = 10.0, retry_timeout_s: float = 60.0, traffic: Traffic | None = None
    ) -> None:
        self.url = url
        super().__init__(url, timeout_s, retry_timeout_s, traffic)

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Refuse: web servers have no listing that programs could rely on."""
        raise ValueError(f"the folders of {self.shown()} can't be listed: give a bucket, a folder or an index")

    def folders(self, prefix: str = "") -> list[str]:
        """Refuse, as `objects`."""
        raise ValueError(f"the folders of {self.shown()} can't be listed: give a bucket, a folder or an index")

    def put(self, key: str, content: Any, size: int = 0) -> None:
        """Refuse: web servers are only read."""
        raise PermissionError(f"{self.shown()} is a web server, and is only read: give a bucket or a folder")

    def _open(self) -> Any:
        from obstore.store import HTTPStore

        return HTTPStore.from_url(self.url, **self._options())

    def _explain(self, error: Exception, key: str | None) -> Exception:
        if isinstance(error, RuntimeError | ImportError):
            return error
        full = str(error)
        text = full.split("\n\nDebug source")[0]
        status = (re.findall(r"status code: (\d{3})", text) or [""])[0]
        where = f"{self.shown()}/{key}"
        if status == "404" or isinstance(error, FileNotFoundError):
            return FileNotFoundError(f"there is no {where} (404): check the URL")
        if status in ("401", "403"):
            return PermissionError(f"{where} may not be read ({status}): check the URL, or that it is still valid")
        if not status:
            return TemporaryError(f"{where} is not reachable{cause(full)}: check the network and the URL")
        kind = TemporaryError if status.startswith("5") or status in ("408", "429") else ConnectionError
        return kind(f"{where} answered {status}: try again later, or check the URL")

    def shown(self) -> str:
        """Return the URL without user, password and query."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
