"""What an S3 client says in its own words, said in those of the config."""

from __future__ import annotations

import os
import re
from typing import Any, Protocol

from ddp_hydra.storage.retry import OtherRegionError, StaleCredentialsError, TemporaryError

_STALE = ("ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired", "401")
_OTHER_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed")
_ROLE_REQUESTS = ("/latest/api/token", "/latest/meta-data", "169.254.169.254", "169.254.170.2")


class Bucket(Protocol):
    """What the messages name of a bucket.

    Args:
        name: of the bucket.
        endpoint_url: of the store; None for AWS.
        region: of the bucket; None for the default one.
        anon: whether it is read without credentials.
        credentials: that were given; None for the provider's chain.
        setting: the config key that names the bucket.
    """

    name: str
    endpoint_url: str | None
    region: str | None
    anon: bool
    credentials: Any
    setting: str


def explain(error: Exception, bucket: Bucket, key: str | None = None) -> Exception:
    """Turn an error of the client into a builtin one that says what to type.

    Args:
        error: of obstore.
        bucket: what was read.
        key: the object, where it was one.

    Returns:
        FileNotFoundError, PermissionError, ConnectionError or ValueError; OSError for what is not known here. Of a
        kind in `patience` where another try may help.
    """
    if isinstance(error, RuntimeError | ImportError | PermissionError):
        return error
    full = str(error)
    text = full.split("\n\nDebug source")[0]
    status = (re.findall(r"status code: (\d{3})", text) or [""])[0]
    code = (re.findall(r"<Code>(\w+)</Code>", text) or [status])[0]
    where = f"at {bucket.endpoint_url}" if bucket.endpoint_url else "at AWS (no data.endpoint_url is given)"
    name = f"bucket {bucket.name!r}"

    if code == "NoSuchBucket":
        return FileNotFoundError(f"there is no {name} {where}: check {bucket.setting}=... and data.endpoint_url=...")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"there is no object s3://{bucket.name}/{key} {where}")
    if any(request in text for request in _ROLE_REQUESTS):  # the last place where the client looks
        return PermissionError(
            f"no S3 credentials were found for {name}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in "
            "the environment (of the workers, too), or AWS_PROFILE and `pip install boto3`, or type "
            "data.anon=true for a public bucket"
        )
    if "without LOCATION" in text or code in _OTHER_REGION:
        region = repr(bucket.region) if bucket.region else "the default one"
        there = (re.findall(r"<Region>([\w-]+)</Region>", text) or [""])[0]
        typed = f"data.region={there}" if there else "data.region=..., for example data.region=us-east-2"
        return OtherRegionError(
            f"the store {where} says that {name} is elsewhere, in another region than {region}: type {typed}; where "
            "the store has one address for each region, check data.endpoint_url=..., too"
        )
    if code in _STALE or status in ("401", "403"):
        refused = StaleCredentialsError if code in _STALE else PermissionError
        return refused(
            f"{name} {where} refused {_credentials(bucket)} ({code}): check AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or AWS_PROFILE, or type data.anon=true for a "
            "public bucket"
        )
    if "HTTP error" in text:
        return TemporaryError(
            f"the S3 store {where} is not reachable{cause(full)}: check the network and data.endpoint_url=..."
        )
    if status:
        kind = TemporaryError if status.startswith("5") or status in ("408", "429") else ConnectionError
        return kind(
            f"the S3 store {where} answered {name} with {code}: if it is an S3 store, try again later; if "
            "not, check data.endpoint_url=..."
        )
    if "invalid path" in text or "parse path" in text:
        path = (re.findall(r'[Pp]ath "([^"]*)"', text) or ["?"])[0]
        return ValueError(
            f"{name} holds an object {path!r}, which has an empty or dotted folder and can't be read: rename "
            "it, or give a prefix without it"
        )
    return OSError(f"{name} {where}: {text}")


def _credentials(bucket: Bucket) -> str:
    if bucket.anon:
        return "a reader without credentials (data.anon=true)"
    if bucket.credentials is None and "AWS_ACCESS_KEY_ID" in os.environ:
        return f"the credentials of the environment (AWS_ACCESS_KEY_ID={os.environ['AWS_ACCESS_KEY_ID'][:4]}...)"
    return "the credentials that were found"


def cause(full: str) -> str:
    """Return " (why)" from the depths of the client's error, or nothing."""
    if "InvalidCertificate" in full:
        return " (its certificate is not trusted: set SSL_CERT_FILE to the file of whoever signed it)"
    found = re.findall(r'message: "([^"]+)"', full) or re.findall(r"kind: (TimedOut|Timeout)", full)
    return f" ({found[-1]})" if found else ""
