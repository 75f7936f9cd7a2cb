"""One bucket of an S3-compatible store."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ddp_hydra.storage.counters import Traffic
from ddp_hydra.storage.remote import Remote
from ddp_hydra.storage.s3_messages import explain


class Bucket(Remote):
    """Lists, reads and writes the objects of one bucket; see `Remote`.

    Credentials come from the environment, from a profile or a shared config file where boto3 is installed, or from
    the machine's role or web identity; none is ever kept here but the ones given. Those that expire are renewed.

    Args:
        name: the bucket.
        endpoint_url: where the store is, e.g. "http://127.0.0.1:9000"; None: what the environment says
            (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL), else AWS.
        region: e.g. "eu-west-1"; None: what the environment says, else "us-east-1".
        anon: read without credentials, as public buckets allow.
        addressing: "path": the bucket's name comes after the host's, which all stores but a few understand;
            "virtual": it is a part of the host's.
        credentials: access key and secret of a store that is nobody's secret, as the embedded one.
        setting: the config key that names the bucket, for messages.
        timeout_s: how long a connection may stay silent.
        retry_timeout_s: how long a read is tried again.
        traffic: counts; None: an own one.

    Raises:
        ValueError: the bucket, the endpoint or the addressing is not written as one.
    """

    def __init__(
        self,
        name: str,
        endpoint_url: str | None = None,
        region: str | None = None,
        anon: bool = False,
        addressing: str = "path",
        credentials: tuple[str, str] | None = None,
        setting: str = "data.bucket",
        timeout_s: float = 10.0,
        retry_timeout_s: float = 60.0,
        traffic: Traffic | None = None,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}", name):
            raise ValueError(
                f"{name!r} is not the name of a bucket (3 to 63 letters, digits, dots and dashes; no "
                f"s3://, no slash): check {setting}=..."
            )
        if addressing not in ("path", "virtual"):
            raise ValueError(f"addressing is {addressing!r}, and is path or virtual: type data.addressing=path")
        self.name = name
        self.url = f"s3://{name}"
        self.endpoint_url = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL"))
        self.region = region
        self.anon = anon
        self.addressing = addressing
        self.credentials = credentials
        self.setting = setting
        if self.endpoint_url is not None:
            url = urlsplit(self.endpoint_url)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(
                    f"endpoint_url is {self.endpoint_url!r}, and must start with http:// or https://, for "
                    "example data.endpoint_url=http://127.0.0.1:9000"
                )
        super().__init__(self.endpoint_url, timeout_s, retry_timeout_s, traffic)

    def _open(self) -> Any:
        from obstore.store import S3Store

        config: dict[str, Any] = {"region": self.region, "skip_signature": self.anon or None}
        config["virtual_hosted_style_request"] = self.addressing == "virtual"
        if self.endpoint_url is not None:
            endpoint = self._virtual_endpoint() if self.addressing == "virtual" else self.endpoint_url
            # The second one is what the environment would set, and would win over the first.
            config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
        if self.credentials is not None:
            config |= {"access_key_id": self.credentials[0], "secret_access_key": self.credentials[1]}
        elif not self.anon:
            config["credential_provider"] = _profile_credentials()
        given = {key: value for key, value in config.items() if value is not None}
        return S3Store(self.name, **self._options(), **given)

    def _virtual_endpoint(self) -> str:
        url = urlsplit(self.endpoint_url or "")
        return urlunsplit(url._replace(netloc=f"{self.name}.{url.netloc}"))

    def _explain(self, error: Exception, key: str | None) -> Exception:
        return explain(error, self, key)


def _profile_credentials() -> Any:
    """Return boto3's credentials where a profile or a shared config file is in use, else None.

    The client itself knows the environment and the machine's roles, but not these files.
    """
    environment = os.environ
    if "AWS_ACCESS_KEY_ID" in environment:
        return None
    files = (
        environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        environment.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    if "AWS_PROFILE" not in environment and not any(Path(file).expanduser().is_file() for file in files):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    from botocore.exceptions import ProfileNotFound

    try:
        return Boto3CredentialProvider()
    except ProfileNotFound as error:
        raise PermissionError(f"{error}: check AWS_PROFILE=...") from None
    except ValueError:  # the files hold no credentials
        return None
