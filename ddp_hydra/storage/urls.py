"""Finds the store that a URL belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ddp_hydra.storage.base import Store
from ddp_hydra.storage.counters import TransferCounters
from ddp_hydra.storage.http import WebServer
from ddp_hydra.storage.local import LocalFolder
from ddp_hydra.storage.s3 import Bucket


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
        traffic: counts over all stores.
    """

    endpoint_url: str | None = None
    region: str | None = None
    anon: bool = False
    addressing: str = "path"
    setting: str = "data.bucket"
    timeout_s: float = 10.0
    retry_timeout_s: float = 60.0
    credentials: tuple[str, str] | None = None
    traffic: TransferCounters = field(default_factory=TransferCounters)
    _stores: dict[str, Store] = field(default_factory=dict, repr=False)

    def open(self, url: str) -> tuple[Store, str]:
        """Return the store of a URL, and its key there.

        Args:
            url: s3://bucket/key, http(s)://host/path, file:///path or a path.

        Raises:
            ValueError: a URL of another kind.
        """
        parts = urlsplit(url)
        if parts.scheme == "s3":
            return self._store(f"s3://{parts.netloc}"), url.removeprefix(f"s3://{parts.netloc}").strip("/")
        if parts.scheme in ("http", "https"):
            query = f"?{parts.query}" if parts.query else ""
            return self._store(f"{parts.scheme}://{parts.netloc}/{query}"), unquote(parts.path).lstrip("/")
        if parts.scheme and parts.scheme != "file" and "://" in url:
            raise ValueError(
                f"{url.split('://')[0]}:// is not known: give s3://bucket/key, http(s)://host/path, file:///path or a "
                f"path: {self.setting}=..."
            )
        path = _local_path(url)
        return self._store(f"file://{path.parent}"), path.name

    def open_folder(self, url: str) -> tuple[Store, str]:
        """Return the store of a folder, and its prefix there; for a local folder, a store of the folder itself and "".

        Args:
            url: as `open`.
        """
        if url.startswith(("s3://", "http://", "https://")):
            return self.open(url)
        return self._store(f"file://{_local_path(url)}"), ""

    def bucket(self, name: str) -> Store:
        """Return a whole store by the name of its bucket, or file:///folder.

        Raises:
            ValueError: that is neither.
        """
        return self._store(f"file://{_local_path(name)}" if name.startswith("file://") else f"s3://{name}")

    def _store(self, root: str) -> Store:
        if root not in self._stores:
            self._stores[root] = self._connect(root)
        return self._stores[root]

    def _connect(self, root: str) -> Store:
        if root.startswith("file://"):
            return LocalFolder(root.removeprefix("file://"), self.traffic)
        if not root.startswith("s3://"):
            return WebServer(root, self.timeout_s, self.retry_timeout_s, self.traffic)
        return Bucket(
            root.removeprefix("s3://"),
            self.endpoint_url,
            self.region,
            self.anon,
            self.addressing,
            self.credentials,
            self.setting,
            self.timeout_s,
            self.retry_timeout_s,
            self.traffic,
        )

    def close(self) -> None:
        """End all waiting for retries."""
        for store in self._stores.values():
            store.close()


def _local_path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path) if url.startswith("file://") else url).expanduser().absolute()
