"""One bucket of an S3-compatible store, by s3fs in place of obstore."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ddp_hydra.storage.base import ObjectChangedError, TemporaryError
from ddp_hydra.storage.fsspec_store import FsspecStore, Opened
from ddp_hydra.storage.s3_messages import check_name, explain, find_endpoint

_CONNECTIONS = 64
_REFUSED_CODES = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404")


class S3fsBucket(FsspecStore):
    """Lists, reads and writes the objects of one bucket by s3fs, slower than `Bucket`; see `FsspecStore`.

    It takes what botocore takes: profiles with single sign-on (`aws sso login`), credential processes, and with
    `options={"requester_pays": True}` buckets whose readers pay.

    Args:
        name: the bucket.
        endpoint_url: see `Bucket`, as all others that are not named here.
        options: arguments of `s3fs.S3FileSystem`; they win over the other arguments.
        retrying: arguments of `Retrying`.
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
        options: Mapping[str, Any] | None = None,
        **retrying: Any,
    ) -> None:
        check_name(name, setting)
        self.name = name
        self.endpoint_url = find_endpoint(endpoint_url, addressing, setting)
        self.region, self.anon, self.addressing, self.credentials = region, anon, addressing, credentials
        super().__init__(f"s3://{name}", options, setting, **retrying)

    def put_if(self, key: str, content: bytes, etag: str | None) -> str:
        """Write an object if it still has this ETag, and return its new ETag; see `Bucket.put_if`."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}

        def put(at: Opened) -> str:
            try:
                return str(at.fs.call_s3("put_object", Bucket=self.name, Key=key, Body=content, **condition)["ETag"])
            except OSError as error:
                code, _ = _answer(error)
                if code in _REFUSED_CODES:
                    raise ObjectChangedError(key) from None
                if code in ("NotImplemented", "501"):
                    raise NotImplementedError from None
                raise

        return self._request(put, key)

    def _etag(self, at: Opened, key: str) -> str:
        return super()._etag(at, key).rpartition("-")[0]

    def _content(self, at: Opened, key: str) -> bytes:
        content: bytes = at.fs.cat_file(at.path(key), max_concurrency=1)  # more would ask for the size before
        return content

    def _list(self, at: Opened, prefix: str) -> list[tuple[str, int]]:
        """List until two answers agree: the client takes an error document, and a lost page, for the end."""
        first, second = super()._list(at, prefix), super()._list(at, prefix)
        if first != second:
            raise TemporaryError(f"{self.url} lists its objects differently each time: try again later")
        return first

    def _files(self, at: Opened, prefix: str) -> Iterator[Mapping[str, Any]]:
        at.fs.invalidate_cache()
        # One listing for all folders; unlike that of other file systems, it raises what goes wrong.
        yield from at.fs.find(at.path(prefix), detail=True).values()

    def _open(self) -> Opened:
        import s3fs

        config = {
            "connect_timeout": 3,
            "read_timeout": self.timeout_s,
            "retries": {"max_attempts": 0},  # this class retries, and counts it
            "max_pool_connections": _CONNECTIONS,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        if self.addressing is not None:
            config["s3"] = {"addressing_style": self.addressing}
        if (urlsplit(self.endpoint_url or "").hostname or "").startswith(("127.", "localhost")):
            config["proxies"] = {}  # a proxy can't reach this machine
        region = self.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        arguments: dict[str, Any] = {
            "anon": self.anon,
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": region or "us-east-1"},
            "config_kwargs": config,
            "use_listings_cache": False,
        }
        if self.credentials is not None:
            arguments |= {"key": self.credentials[0], "secret": self.credentials[1]}
        try:
            fs = s3fs.S3FileSystem(skip_instance_cache=True, **arguments | self.options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"s3fs can't open {self.url}: {error}; check data.storage_options") from None
        fs.retries = 1
        return Opened(fs, f"{self.name}/")

    def _explain(self, error: Exception, key: str | None) -> Exception:
        if isinstance(error, RuntimeError | ImportError | TypeError | ValueError):
            return error
        kind = type(error).__name__
        if kind == "NoCredentialsError":
            text = "/latest/meta-data"  # the place where the other client looks last
        elif kind == "ProfileNotFound":
            return PermissionError(f"{error}: check AWS_PROFILE=...")
        elif "SSO" in kind or "TokenRetrieval" in kind or kind == "CredentialRetrievalError":
            return PermissionError(f"{error}: type `aws sso login`, or check AWS_PROFILE=...")
        else:
            code, status = _answer(error)
            reason = str(error).replace('"', "'").partition("\n")[0][:200]
            text = f"status code: {status} <Code>{code}</Code> {reason}" if code else f'HTTP error, message: "{reason}"'
        is_missing = isinstance(error, FileNotFoundError | IsADirectoryError)
        return explain((FileNotFoundError if is_missing else OSError)(text), self, key)


def _answer(error: BaseException) -> tuple[str, str]:
    """Return the code and the status of the store's answer, from botocore's error behind s3fs's own; "" for none."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return "", ""
    with suppress(KeyError):
        status = str(response["ResponseMetadata"]["HTTPStatusCode"])
        return str(response["Error"].get("Code") or status), status
    return "", ""
