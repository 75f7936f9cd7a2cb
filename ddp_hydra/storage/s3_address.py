"""Checks how a bucket and its endpoint are written."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from ddp_hydra.storage.s3_messages import without_user


def check_name(name: str, setting: str | None) -> None:
    """Check the name of a bucket.

    Args:
        name: of the bucket.
        setting: the config key that names it, for the message.

    Raises:
        ValueError: it can't be one.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}", name):
        raise ValueError(
            f"{name!r} is not the name of a bucket (3 to 63 letters, digits, dots and dashes; no "
            f"s3://, no slash): check {setting}=..."
        )


def find_endpoint(endpoint_url: str | None, addressing: str | None, setting: str | None) -> str | None:
    """Return the endpoint of an S3 store: the one given, or that of the environment; None: AWS.

    Args:
        endpoint_url: as given.
        addressing: "path", "virtual" or None.
        setting: the config key that names the bucket; None: only the environment says where the store is.

    Raises:
        ValueError: the endpoint or the addressing is not written as one.
    """
    if addressing not in ("path", "virtual", None):
        raise ValueError(f"addressing is {addressing!r}, and is path or virtual: type data.addressing=path")
    endpoint_url = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint_url is not None:
        url = urlsplit(endpoint_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(
                f"endpoint_url is {without_user(endpoint_url)!r}, and must start with http:// or https://, "
                f"for example {'data.endpoint_url' if setting else 'AWS_ENDPOINT_URL'}=http://127.0.0.1:9000"
            )
    return endpoint_url
