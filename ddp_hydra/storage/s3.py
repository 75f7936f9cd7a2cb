"""One bucket of an S3-compatible store, or of Google's or Azure's."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ddp_hydra.storage.base import ObjectChangedError
from ddp_hydra.storage.remote import Remote
from ddp_hydra.storage.s3_messages import check_name, explain, find_endpoint


class Bucket(Remote):
    """Lists, reads and writes the objects of one bucket; see `Retrying`.

    Credentials come from the environment, from a profile or a shared config file where botocore is installed, or from
    the machine's role or web identity; none is ever kept here but the ones given. Those that expire are renewed.

    Args:
        name: the bucket.
        endpoint_url: where the store is, e.g. "http://127.0.0.1:9000"; None: what the environment says
            (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL), else AWS.
        region: e.g. "eu-west-1"; None: what the environment says, else "us-east-1".
        anon: read without credentials, as public buckets allow.
        addressing: "path": the bucket's name comes after the host's name, which most stores understand; "virtual": it
            is a part of the host's name; None: what the environment says, else "path".
        credentials: access key and secret of a store where they are not secret, as the embedded one.
        setting: the config key that names the bucket, for messages; None: only the environment says where the store
            is and who may use it.
        scheme: "s3"; "gs" and "az" use what obstore finds of GOOGLE_* and AZURE_*, and no test covers them.
        client_retries: how often obstore itself repeats a request, so that one failed piece of a large object does not
            cost the others.
        retrying: arguments of `Retrying`: timeout_s, retry_timeout_s and traffic.

    Raises:
        ValueError: the bucket, the endpoint or the addressing is not written as one.
    """

    def __init__(
        self,
        name: str,
        endpoint_url: str | None = None,
        region: str | None = None,
        anon: bool = False,
        addressing: str | None = "path",
        credentials: tuple[str, str] | None = None,
        setting: str | None = "data.bucket",
        scheme: str = "s3",
        client_retries: int = 0,
        **retrying: Any,
    ) -> None:
        check_name(name, setting)
        self.name = name
        self.scheme = scheme
        self.url = f"{scheme}://{name}"
        self.endpoint_url = find_endpoint(endpoint_url, addressing, setting) if scheme == "s3" else None
        self.region = region
        self.anon = anon
        self.addressing = addressing
        self.credentials = credentials
        self.setting = setting
        self.client_retries = client_retries
        super().__init__(**retrying)

    def put_if(self, key: str, content: bytes, etag: str | None) -> str:
        """Write an object if it still has this ETag (None: if there is no object), and return its new ETag.

        A try whose answer was lost may have written it: then the next one finds a changed object.

        Raises:
            ObjectChangedError: the object has another ETag.
            NotImplementedError: the store has no conditional writes.
            Exception: as `put`.
        """
        from obstore import exceptions

        mode: Any = "create" if etag is None else {"e_tag": etag}

        def put(store: Any) -> str:
            try:
                return str(store.put(key, content, mode=mode)["e_tag"])
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotFoundError):
                raise ObjectChangedError(key) from None
            except exceptions.NotSupportedError:
                raise NotImplementedError from None
            except Exception as error:
                if "status code: 501" in str(error):
                    raise NotImplementedError from None
                raise

        return self._request(put, key)

    def _open(self) -> Any:
        from obstore.store import AzureStore, GCSStore, S3Store

        if self.scheme != "s3":
            return (GCSStore if self.scheme == "gs" else AzureStore)(self.name, **self._options(self.endpoint_url))
        config: dict[str, Any] = {"region": self.region, "skip_signature": self.anon or None}
        if self.addressing is not None:
            config["virtual_hosted_style_request"] = self.addressing == "virtual"
        if self.endpoint_url is not None:
            url = urlsplit(self.endpoint_url)
            virtual = urlunsplit(url._replace(netloc=f"{self.name}.{url.netloc}"))
            endpoint = virtual if self.addressing == "virtual" else self.endpoint_url
            # The second one is what the environment would set, and would win over the first.
            config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
        if self.credentials is not None:
            config |= {"access_key_id": self.credentials[0], "secret_access_key": self.credentials[1]}
        elif not self.anon:
            config["credential_provider"] = _profile_credentials()
        given = {key: value for key, value in config.items() if value is not None}
        return S3Store(self.name, **self._options(self.endpoint_url), **given)

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
        return explain(error, self, key)


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
