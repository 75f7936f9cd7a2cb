"""One bucket of an S3-compatible store: listing and reading, with errors that say what to type."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from data.s3_errors import explain

if TYPE_CHECKING:
    from obstore.store import S3Store

# The client of S3 starts threads that a fork does not copy: used on both sides of one, it hangs.
_used_in: int | None = None


class Bucket:
    """Lists and reads the objects of one bucket.

    It opens its connections when they are first needed, in each process anew, so it can be pickled at any
    time. Its methods may be called from many threads at once.

    Credentials come from the environment, from a profile or a shared config file where boto3 is installed,
    or from the machine's role; none is ever kept here but the ones given.

    Args:
        name: the bucket.
        endpoint_url: where the store is, e.g. "http://127.0.0.1:9000"; None: what the environment says
            (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL), else AWS.
        region: e.g. "eu-west-1"; None: what the environment says, else "us-east-1".
        anon: read without credentials, as public buckets allow.
        credentials: access key and secret of a store that is nobody's secret, as the embedded one.
        setting: the config key that names the bucket, for messages.

    Raises:
        ValueError: the bucket or the endpoint is not written as one.
    """

    def __init__(
        self,
        name: str,
        endpoint_url: str | None = None,
        region: str | None = None,
        anon: bool = False,
        credentials: tuple[str, str] | None = None,
        setting: str = "data.bucket",
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}", name):
            raise ValueError(
                f"{name!r} is not the name of a bucket (3 to 63 letters, digits, dots and dashes; no "
                f"s3://, no slash): check {setting}=..."
            )
        self.name = name
        self.endpoint_url = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL"))
        self.region = region
        self.anon = anon
        self.credentials = credentials
        self.setting = setting
        self._stores: dict[bool, S3Store] = {}
        if self.endpoint_url is not None:
            url = urlsplit(self.endpoint_url)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(
                    f"endpoint_url is {self.endpoint_url!r}, and must start with http:// or https://, for "
                    "example data.endpoint_url=http://127.0.0.1:9000"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stores": {}}

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """List the objects under a folder.

        Args:
            prefix: the folder, without the bucket; "" for all.

        Yields:
            Key and size in bytes. The key of a folder's marker comes without its last slash, and size 0.

        Raises:
            FileNotFoundError: there is no such bucket.
            PermissionError: no credentials, or wrong ones.
            ConnectionError: the endpoint is not reachable, or is no S3 store.
            ValueError: another region, or a key that is no path.
        """
        import obstore

        try:
            for chunk in obstore.list(self._store(patient=False), prefix=prefix or None):
                for item in chunk:
                    yield item["path"], item["size"]
        except Exception as error:
            raise explain(error, self) from None

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under `prefix`; raises as `objects`."""
        import obstore

        try:
            found = obstore.list_with_delimiter(self._store(patient=False), prefix=prefix or None)
        except Exception as error:
            raise explain(error, self) from None
        return sorted(folder.rsplit("/", 1)[-1] for folder in found["common_prefixes"])

    def get(self, key: str) -> bytearray:
        """Return the content of an object.

        Raises:
            FileNotFoundError: there is no such object.
            PermissionError: as `objects`.
            ConnectionError: as `objects`, after a minute of retries.
        """
        import obstore

        try:
            return bytearray(obstore.get(self._store(patient=True), key).bytes())
        except Exception as error:
            raise explain(error, self, key) from None

    def _store(self, patient: bool) -> S3Store:
        """Open the store once in a process: patient for reads amid training, not for the first contact."""
        _refuse_after_fork()
        if patient not in self._stores:
            self._stores[patient] = self._open(patient)
        return self._stores[patient]

    def _open(self, patient: bool) -> S3Store:
        from obstore.store import S3Store

        client: dict[str, Any] = {"connect_timeout": timedelta(seconds=3), "timeout": timedelta(seconds=30)}
        config: dict[str, Any] = {"region": self.region, "skip_signature": self.anon or None}
        if self.endpoint_url is not None:
            # The second one is what the environment would set, and would win over the first.
            config |= {"endpoint": self.endpoint_url, "aws_endpoint_url_s3": self.endpoint_url}
            client["allow_http"] = True
            host = urlsplit(self.endpoint_url).hostname or ""
            if host == "localhost" or host.startswith("127."):
                # A proxy of the environment can't reach this machine; one that excludes it is the way round.
                client |= {"proxy_url": self.endpoint_url, "proxy_excludes": host}
        if self.credentials is not None:
            config |= {"access_key_id": self.credentials[0], "secret_access_key": self.credentials[1]}
        elif not self.anon:
            config["credential_provider"] = _profile_credentials()
        retry: Any = {
            "max_retries": 12 if patient else 3,
            "retry_timeout": timedelta(seconds=60 if patient else 10),
            "backoff": {
                "init_backoff": timedelta(seconds=0.1),
                "max_backoff": timedelta(seconds=10),
                "base": 2,
            },
        }
        given = {key: value for key, value in config.items() if value is not None}
        client_options: Any = client
        return S3Store(self.name, client_options=client_options, retry_config=retry, **given)


def _refuse_after_fork() -> None:
    global _used_in
    if _used_in not in (None, os.getpid()):
        raise RuntimeError(
            f"S3 was used in process {_used_in}, which then forked this one, {os.getpid()}: the client "
            "would hang here. Read in threads (data.threads=...), or start processes by 'spawn' or "
            "'forkserver'"
        )
    _used_in = os.getpid()


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
