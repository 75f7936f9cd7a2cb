"""A folder in a bucket of an S3-compatible store: objects that are put there whole or not at all.

Where the store is and who may use it say the AWS_* variables of the environment (AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID …), a profile, or the role of the machine: never a config.

gs:// and az:// are opened in the same way, with what obstore finds of GOOGLE_* and AZURE_*; no test has seen them.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import IO, Any
from urllib.parse import urlsplit

from ddp_hydra.errors import ConfigError

PIECE_BYTES = 8 * 2**20
_MOST_PIECES = 9000  # S3 takes 10,000
_URL = re.compile(r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]{1,62})((?:/[^/?#\\]+)*)/?")
_REFUSED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "401", "403")
_OTHER_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed")
_HOMES = {"s3": "at AWS (no AWS_ENDPOINT_URL is set)", "gs": "at Google", "az": "at Azure"}
_ROLE_REQUESTS = ("/latest/api/token", "/latest/meta-data", "169.254.169.254", "169.254.170.2")


class Changed(Exception):
    """An object is not what it was."""


class Folder:
    """Reads and writes the objects of one folder. Nothing is asked of the store until the first of them.

    Args:
        url: "s3://bucket/folder".
        timeout_s: of one request; large objects go and come in pieces.

    Raises:
        ConfigError: the URL is none of a bucket, or obstore is not installed.
    """

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        match = _URL.fullmatch(url)
        if match is None or any(part in (".", "..") for part in url.split("/")):
            # The URL itself is not shown: it may hold a secret.
            raise ConfigError("a bucket is given as s3://bucket/folder, without credentials, query or empty parts")
        try:
            import obstore
        except ImportError:
            raise ConfigError("buckets need the package obstore: pip install 'ddp-hydra[s3]'") from None
        self.url = url.rstrip("/")
        self._kind, self.bucket, self._prefix = match[1], match[2], match[3].strip("/")
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        self.endpoint_url = endpoint if self._kind == "s3" else None
        self._timeout_s = timeout_s
        self._obstore = obstore
        self._opened: Any = None

    def get(self, name: str) -> bytes:
        """Return the content of a small object.

        Raises:
            FileNotFoundError: there is none.
            ConfigError: there is no such bucket, or it does not let us in; the message says what to set.
            ConnectionError: the store is not reachable, or out of order.
        """
        try:
            return bytes(self._obstore.get(self._store(), self._key(name)).bytes())
        except Exception as error:
            raise self._explain(error, name) from None

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return some bytes of an object; raises as `get`."""
        try:
            return bytes(self._obstore.get_range(self._store(), self._key(name), start=start, end=end))
        except Exception as error:
            raise self._explain(error, name) from None

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, None if there is none; raises as `get` otherwise."""
        try:
            return int(self._obstore.head(self._store(), self._key(name))["size"])
        except Exception as error:
            explained = self._explain(error, name)
            if isinstance(explained, FileNotFoundError):
                return None
            raise explained from None

    def put(self, name: str, content: bytes | IO[bytes], size: int = 0) -> None:
        """Put an object there, replacing an older one at the moment when it is complete.

        Args:
            name: its name in this folder.
            content: its bytes, or a file to read them from.
            size: of a file, in bytes.

        Raises:
            ConfigError: as `get`.
            ConnectionError: as `get`.
        """
        piece = max(PIECE_BYTES, -(-size // _MOST_PIECES))
        try:
            self._obstore.put(self._store(), self._key(name), content, chunk_size=piece, max_concurrency=4)
        except Exception as error:
            raise self._explain(error, name) from None

    def delete(self, name: str) -> None:
        """Remove an object, if it is there; raises as `put`."""
        try:
            self._obstore.delete(self._store(), self._key(name))
        except Exception as error:
            explained = self._explain(error, name)
            if not isinstance(explained, FileNotFoundError):
                raise explained from None

    def tag(self, name: str) -> str | None:
        """Return the ETag of an object, None if there is none; raises as `get` otherwise."""
        try:
            return str(self._obstore.head(self._store(), self._key(name))["e_tag"])
        except Exception as error:
            explained = self._explain(error, name)
            if isinstance(explained, FileNotFoundError):
                return None
            raise explained from None

    def put_if(self, name: str, content: bytes, tag: str | None) -> str:
        """Put an object there where it still has an ETag, None: where there is none; returns the new ETag.

        Raises:
            Changed: it is another.
            NotImplementedError: the store takes no conditions.
            ConfigError: as `get`.
            ConnectionError: as `get`.
        """
        mode: Any = "create" if tag is None else {"e_tag": tag}
        try:
            return str(self._obstore.put(self._store(), self._key(name), content, mode=mode)["e_tag"])
        except Exception as error:
            kind = type(error).__name__
            if kind in ("AlreadyExistsError", "PreconditionError", "NotFoundError"):
                raise Changed(name) from None
            if kind in ("NotSupportedError", "NotImplementedError") or "status code: 501" in str(error):
                raise NotImplementedError from None
            raise self._explain(error, name) from None

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")

    def _store(self) -> Any:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> Any:
        from obstore.store import AzureStore, GCSStore, S3Store

        seconds = timedelta(seconds=self._timeout_s)
        client: dict[str, Any] = {"connect_timeout": min(seconds, timedelta(seconds=5)), "timeout": seconds}
        config: dict[str, Any] = {}
        if self.endpoint_url:
            config = {"endpoint": self.endpoint_url, "aws_endpoint_url_s3": self.endpoint_url}
            client["allow_http"] = True
            host = urlsplit(self.endpoint_url).hostname or ""
            if host == "localhost" or host.startswith("127."):
                # A proxy of the environment can't reach this machine; one that excludes it is the way round.
                client |= {"proxy_url": self.endpoint_url, "proxy_excludes": host}
        # One piece of many may fail and be sent again; whoever calls has patience of their own.
        retry: Any = {
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=10),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
        }
        options: Any = client
        if self._kind == "gs":
            return GCSStore(self.bucket, client_options=options, retry_config=retry)
        if self._kind == "az":
            return AzureStore(self.bucket, client_options=options, retry_config=retry)
        if (credentials := _profile_credentials()) is not None:
            config["credential_provider"] = credentials
        return S3Store(self.bucket, client_options=options, retry_config=retry, **config)

    def _explain(self, error: Exception, name: str) -> Exception:
        """Say in our words what the client says in its own, which may be long and is nothing for a log."""
        text = str(error).split("\n\nDebug source")[0]
        status = (re.findall(r"status code: (\d{3})", text) or re.findall(r"\b([45]\d\d) [A-Z]", text) or [""])[0]
        code = (re.findall(r"<Code>(\w+)</Code>", text) or [status])[0]
        where = f"at {_without_user(self.endpoint_url)}" if self.endpoint_url else _HOMES[self._kind]
        if code == "NoSuchBucket":
            return ConfigError(f"there is no bucket {self.bucket!r} {where}: make it, or check the name")
        if isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError":
            return FileNotFoundError(f"there is no object {self.url}/{name} {where}")
        if any(request in text for request in _ROLE_REQUESTS):  # the last place where the client looks
            return ConfigError(
                f"no credentials were found for bucket {self.bucket!r}: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY in the environment, or AWS_PROFILE and `pip install boto3`"
            )
        if "without LOCATION" in text or code in _OTHER_REGION:
            return ConfigError(f"bucket {self.bucket!r} is in another region: set AWS_REGION=..., e.g. us-east-2")
        if code in _REFUSED or isinstance(error, PermissionError) or type(error).__name__.startswith("Permission"):
            return ConfigError(
                f"bucket {self.bucket!r} {where} refused the credentials that were found ({code or 'no reason'}): "
                "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or AWS_PROFILE"
            )
        if code:
            return ConnectionError(f"the store {where} answered bucket {self.bucket!r} with {code}")
        if "HTTP error" in text or "timed out" in text.lower():
            return ConnectionError(f"the store {where} is not reachable{_cause(str(error))}")
        return ConnectionError(f"the store {where} failed for bucket {self.bucket!r} ({type(error).__name__})")


def _without_user(url: str | None) -> str:
    return re.sub(r"//[^/]*@", "//", url or "")


def _cause(full: str) -> str:
    """Return " (why)" from the depths of the client's error, or nothing."""
    found = re.findall(r'message: "([^"]+)"', full) or re.findall(r"kind: (TimedOut|Timeout)", full)
    return f" ({found[-1]})" if found else ""


def _profile_credentials() -> Any:
    """Return boto3's credentials where a profile is named and boto3 is there, else None.

    The client itself knows the environment and the machine's roles, but no profiles.
    """
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_PROFILE" not in os.environ:
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    from botocore.exceptions import ProfileNotFound

    try:
        return Boto3CredentialProvider()
    except ProfileNotFound as error:
        raise ConfigError(f"{error}: check AWS_PROFILE=...") from None
    except ValueError:  # it holds no credentials
        return None
