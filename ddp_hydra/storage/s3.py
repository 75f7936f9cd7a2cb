"""One bucket of an S3-compatible store, or of Google's or Azure's."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ddp_hydra.console.text import expanded
from ddp_hydra.storage.base import (
    NoBucketError,
    ObjectChangedError,
    OtherRegionError,
    StaleCredentialsError,
    TemporaryError,
    TransferCounters,
    bare_url,
    cause,
)
from ddp_hydra.storage.object_store import ObjectStore

_STALE = (
    "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired", "401", "400"
)  # fmt: skip
"""Codes of credentials that have expired; 400 is what a HEAD request gets then, which has no body and so no code."""
_REFUSED = (*_STALE, "AccessDenied", "403")
_REFUSALS = ("PermissionDeniedError", "UnauthenticatedError")
_OTHER_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed")
_ROLE_REQUESTS = ("/latest/api/token", "/latest/meta-data", "169.254.169.254", "169.254.170.2")


def endpoint_of(given: str | None) -> str | None:
    """Return where s3:// URLs are: what is given, else what the environment says; None: AWS."""
    found = (given, *map(os.environ.get, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")))
    return next(filter(None, found), None)


@dataclass(frozen=True)
class BucketAddress:
    """Where a bucket is, and how to sign in.

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
            is, and which users may read it.
        scheme: "s3"; "gs" and "az" use what obstore finds of GOOGLE_* and AZURE_*, and no test covers them.
        prefix: a folder in it: keys are below that.

    Raises:
        ValueError: the bucket, the endpoint or the addressing is not written as one.
    """

    name: str
    endpoint_url: str | None = None
    region: str | None = None
    anon: bool = False
    addressing: str | None = "path"
    credentials: tuple[str, str] | None = None
    setting: str | None = "data.bucket"
    scheme: str = "s3"
    prefix: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, self.setting)
        if self.addressing not in ("path", "virtual", None):
            raise ValueError(f"addressing is {self.addressing!r}, and is path or virtual: type data.addressing=path")
        endpoint = endpoint_of(self.endpoint_url) if self.scheme == "s3" else None
        object.__setattr__(self, "endpoint_url", endpoint)
        if endpoint is not None:
            url = urlsplit(endpoint)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(
                    f"endpoint_url is {bare_url(endpoint)!r}, and must start with http:// or https://, "
                    f"for example {'data.endpoint_url' if self.setting else 'AWS_ENDPOINT_URL'}=http://127.0.0.1:9000"
                )

    @property
    def url(self) -> str:
        """Return the URL of the bucket, or of the folder in it."""
        return f"{self.scheme}://{self.name}/{self.prefix}".rstrip("/")


def check_name(name: str, setting: str | None) -> None:
    """Refuse what can't be the name of a bucket; `setting` is the config key that names it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}", name):
        advice = ": give s3://bucket/folder" if setting is None else f" or a path: check {setting}=..."
        raise ValueError(f"{name!r} is not the name of a bucket (3 to 63 letters, digits, .-){advice}")


def explain(error: Exception, bucket: BucketAddress, key: str | None = None) -> Exception:
    """Turn an error of obstore into a builtin one that says what to type; OSError for an unknown error.

    It is a kind of `base.py` where another try may help. The request was about an object if there is a `key`.
    """
    full = str(error)
    text = full.split("\n\nDebug source")[0]
    status = (re.findall(r"status code: (\d{3})", text) or re.findall(r"\b([45]\d\d) [A-Z]", text) or [""])[0]
    code = (re.findall(r"<Code>(\w+)</Code>", text) or [status])[0]
    where, name, is_data = _where(bucket), f"bucket {bucket.name!r}", bucket.setting is not None
    endpoint = "data.endpoint_url=..." if is_data else "AWS_ENDPOINT_URL in the environment"
    of_object = f"{bucket.url}/{key}: " if key is not None else ""

    public = ", or type data.anon=true for a public bucket" if is_data and bucket.scheme == "s3" else ""
    if code == "NoSuchBucket":
        typed = f"check {bucket.setting}=..." if is_data else "make it, or check its name"
        return NoBucketError(f"there is no {name} {where}: {typed} and {endpoint}")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"there is no object {bucket.url}/{key} {where}")
    if any(request in text for request in _ROLE_REQUESTS):  # the last place where the client looks
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE and `pip install botocore`,"
        keys = {"gs": "GOOGLE_*", "az": "AZURE_*"}.get(bucket.scheme, keys)
        return PermissionError(
            f"no credentials were found for {name}: set {keys} in the environment (of the workers, too){public}"
        )
    if "without LOCATION" in text or code in _OTHER_REGION:
        region = repr(bucket.region) if bucket.region else "the default one"
        there = (re.findall(r"<Region>([\w-]+)</Region>", text) or [""])[0]
        typed = "type data.region=" if is_data else "set AWS_REGION="
        typed += there or f"..., for example {typed.split()[1]}us-east-2"
        return OtherRegionError(f"{name} {where} is in another region than {region}: {typed}; or check {endpoint}")
    if code in _REFUSED or status in ("401", "403") or type(error).__name__ in _REFUSALS:
        refused = StaleCredentialsError if code in _STALE else PermissionError
        return refused(
            f"{name} {where} refused {_credentials(bucket)} ({code or 'no reason'}): check AWS_ACCESS_KEY_ID, "
            f"AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or AWS_PROFILE{public}"
        )
    if "HTTP error" in text:
        return TemporaryError(
            f"{of_object}the store {where} is not reachable{cause(full)}: check the network and {endpoint}"
        )
    if status:
        kind = TemporaryError if status.startswith("5") or status in ("408", "429") else ConnectionError
        return kind(f"{of_object}the store {where} answered {name} with {code}: try again later, or check {endpoint}")
    if "invalid path" in text or "parse path" in text:
        path = (re.findall(r'[Pp]ath "([^"]*)"', text) or ["?"])[0]
        return ValueError(
            f"{name} holds an object {path!r}, which has an empty or dotted folder: rename it, or give another prefix"
        )
    # The client's own words may be long, and a log of results repeats them.
    return OSError(f"the store {where} failed for {name}: {text if is_data else type(error).__name__}")


def explain_s3fs(error: Exception, bucket: BucketAddress, key: str | None = None) -> Exception:
    """Turn an error of s3fs into a builtin one that says what to type; see `explain`."""
    kind = type(error).__name__
    if kind == "NoCredentialsError":
        text = "/latest/meta-data"  # the place where the other client looks last
    elif kind == "ProfileNotFound":
        return PermissionError(f"{error}: check AWS_PROFILE=...")
    elif "SSO" in kind or "TokenRetrieval" in kind or kind == "CredentialRetrievalError":
        return PermissionError(f"{error}: type `aws sso login`, or check AWS_PROFILE=...")
    else:
        # botocore's error is behind s3fs's own
        answer: Any = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
        status = code = ""
        with suppress(KeyError, TypeError):
            status = str(answer["ResponseMetadata"]["HTTPStatusCode"])
            code = str(answer["Error"].get("Code") or status)
        reason = str(error).replace('"', "'").partition("\n")[0][:200]
        text = f"status code: {status} <Code>{code}</Code> {reason}" if code else f'HTTP error, message: "{reason}"'
    is_missing = isinstance(error, FileNotFoundError | IsADirectoryError)
    return explain((FileNotFoundError if is_missing else OSError)(text), bucket, key)


def _where(bucket: BucketAddress) -> str:
    if bucket.endpoint_url:
        return f"at {bare_url(bucket.endpoint_url)}"
    if bucket.scheme != "s3":
        return "at Google" if bucket.scheme == "gs" else "at Azure"
    return f"at AWS (no {'data.endpoint_url is given' if bucket.setting else 'AWS_ENDPOINT_URL is set'})"


def _credentials(bucket: BucketAddress) -> str:
    if bucket.anon:
        return "a reader without credentials (data.anon=true)"
    if bucket.credentials is None and "AWS_ACCESS_KEY_ID" in os.environ:
        return f"the credentials of the environment (AWS_ACCESS_KEY_ID={os.environ['AWS_ACCESS_KEY_ID'][:4]}...)"
    return "the credentials that were found"


class Bucket(ObjectStore):
    """Lists, reads and writes the objects of one bucket; see `BucketAddress` and `Store` for its arguments.

    Credentials come from the environment, from a profile or a shared config file where botocore is installed, or from
    the machine's role or web identity; none is ever kept here but the ones given. Those that expire are renewed.

    Args:
        client_retries: how often obstore itself repeats a request, so that one failed piece of a large object does not
            cost the others.
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
        self.url, self.setting, self.endpoint_url = self.address.url, self.address.setting, self.address.endpoint_url
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

    def _explain_answer(self, error: Exception, key: str | None) -> Exception:
        return explain(error, self.address, key)


class _ProfileCredentials:
    """Credentials of botocore's session, in the form that obstore asks for; see `_profile_credentials`."""

    TTL = timedelta(minutes=10)
    """How long obstore uses credentials before it asks again: botocore renews those that expire in less."""

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
    if "AWS_PROFILE" not in environment and not any(expanded(file).is_file() for file in files):
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
