"""One bucket of an S3-compatible store, or of Google's or Azure's."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ddp_hydra.storage.base import ObjectChangedError, TransferCounters
from ddp_hydra.storage.object_store import ObjectStore
from ddp_hydra.storage.s3_messages import BucketAddress, explain


class Bucket(ObjectStore):
    """Lists, reads and writes the objects of one bucket; see `Store`.

    Credentials come from the environment, from a profile or a shared config file where botocore is installed, or from
    the machine's role or web identity; none is ever kept here but the ones given. Those that expire are renewed.

    Args:
        name: the bucket.
        endpoint_url: see `BucketAddress`.
        region: see `BucketAddress`.
        client_retries: how often obstore itself repeats a request, so that one failed piece of a large object does not
            cost the others.
        timeout_s: see `Store`, as `retry_timeout_s` and `traffic`.
        retry_timeout_s: see above.
        traffic: see above.
        address: further arguments of `BucketAddress`, which raises for what is not written as one.
    """

    def __init__(
        self,
        name: str,
        endpoint_url: str | None = None,
        region: str | None = None,
        *,
        client_retries: int = 0,
        timeout_s: float = 10.0,
        retry_timeout_s: float = 60.0,
        traffic: TransferCounters | None = None,
        **address: Any,
    ) -> None:
        self.address = BucketAddress(name, endpoint_url, region, **address)
        self.url, self.setting = self.address.url, self.address.setting
        self.client_retries = client_retries
        super().__init__(timeout_s, retry_timeout_s, traffic)

    def _put_if(self, client: Any, key: str, content: bytes, etag: str | None) -> str:
        from obstore import exceptions

        mode: Any = "create" if etag is None else {"e_tag": etag}
        try:
            return str(client.put(key, content, mode=mode)["e_tag"])
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotFoundError):
            raise ObjectChangedError(key) from None
        except exceptions.NotSupportedError:
            raise NotImplementedError from None
        except Exception as error:
            if "status code: 501" in str(error):
                raise NotImplementedError from None
            raise

    def _open(self) -> Any:
        from obstore.store import AzureStore, GCSStore, S3Store

        to, options = self.address, self._options(self.address.endpoint_url)
        if to.prefix:
            options["prefix"] = to.prefix
        if to.scheme != "s3":
            return (GCSStore if to.scheme == "gs" else AzureStore)(to.name, **options)
        config: dict[str, Any] = {"region": to.region, "skip_signature": to.anon or None}
        if to.addressing is not None:
            config["virtual_hosted_style_request"] = to.addressing == "virtual"
        if to.endpoint_url is not None:
            url = urlsplit(to.endpoint_url)
            virtual = urlunsplit(url._replace(netloc=f"{to.name}.{url.netloc}"))
            endpoint = virtual if to.addressing == "virtual" else to.endpoint_url
            # The second one is what the environment would set, and would win over the first.
            config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
        if to.credentials is not None:
            config |= {"access_key_id": to.credentials[0], "secret_access_key": to.credentials[1]}
        elif not to.anon:
            config["credential_provider"] = _profile_credentials()
        given = {key: value for key, value in config.items() if value is not None}
        return S3Store(to.name, **options, **given)

    def _options(self, url: str | None) -> dict[str, Any]:
        options = super()._options(url)
        if self.client_retries:
            options["retry_config"] = {
                "max_retries": self.client_retries,
                "retry_timeout": timedelta(seconds=10),
                "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
            }
        return options

    def _explain(self, error: Exception, key: str | None) -> Exception:
        return explain(error, self.address, key)


class _ProfileCredentials:
    """Credentials of botocore's session, in the form that obstore asks for; see `_profile_credentials`."""

    TTL = timedelta(minutes=30)
    """How long obstore uses credentials before it asks again; botocore renews its own in good time."""

    def __init__(self, session: Any, credentials: Any) -> None:
        region = session.get_config_variable("region")
        self.config = {} if region is None else {"region": region}  # obstore reads this attribute
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        """Return the credentials that are valid now."""
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + self.TTL,
        }


def _profile_credentials() -> _ProfileCredentials | None:
    """Return botocore's credentials where a profile or a shared config file is in use, else None.

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
        from botocore.exceptions import ProfileNotFound
        from botocore.session import Session
    except ImportError:
        return None
    session = Session()
    try:
        credentials = session.get_credentials()
    except ProfileNotFound as error:
        raise PermissionError(f"{error}: check AWS_PROFILE=...") from None
    return None if credentials is None else _ProfileCredentials(session, credentials)
