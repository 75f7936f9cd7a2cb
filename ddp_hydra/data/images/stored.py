"""Labelled images that are read from URLs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ddp_hydra.data.forked_reader import ForkSafeAccess
from ddp_hydra.data.images.dataset import ImageDataset


class StoredImages(ImageDataset):
    """Labelled images that are read from stores; a subclass knows their keys.

    Args:
        endpoint_url: of s3:// URLs; None: what the environment says, else AWS.
        region: of s3:// URLs; None: what the environment says.
        anon: read s3:// URLs without credentials, as public buckets allow.
        addressing: of s3:// URLs, "path" or "virtual", see `storage.Bucket`.
        client: what reads s3:// URLs, "obstore" or, where that lacks something, "s3fs".
        storage_options: arguments of fsspec's file system, for s3fs and for URLs that only fsspec knows.
        timeout_s: how long a connection may be silent.
        retry_timeout_s: how long a failing read is tried again.
        images: arguments of `ImageDataset`: transform, threads, cache_mb, max_bad_fraction and more.

    Attributes:
        access: how URLs are read.

    Raises:
        ValueError: an argument is out of its range.
        ModuleNotFoundError: s3fs is not installed.
    """

    setting: ClassVar[str] = "data.bucket"
    """The config key that holds the URL, for messages."""

    def __init__(
        self,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        anon: bool = False,
        addressing: str = "path",
        client: str = "obstore",
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
        retry_timeout_s: float = 60.0,
        **images: Any,
    ) -> None:
        super().__init__(**images)
        self.access = ForkSafeAccess(
            *(endpoint_url, region, anon, addressing, self.setting, timeout_s, retry_timeout_s),
            client=client,
            storage_options=storage_options,
            traffic=self.traffic,
        )

    def close(self) -> None:
        """Stop the threads and all retries."""
        self.access.close()
        super().close()
