"""An S3 server for the tests, and an environment without anybody's credentials."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from ddp_hydra.data.demo_server import Seaweed

KEYS = {"AWS_ACCESS_KEY_ID": "testing-key", "AWS_SECRET_ACCESS_KEY": "testing-secret", "AWS_REGION": "us-east-1"}
"""The environment with credentials that the server takes."""


class S3Server:
    """A SeaweedFS store on loopback, whose buckets tests fill.

    Attributes:
        client: botocore's client of it, for a look behind the scenes.
    """

    def __init__(self) -> None:
        from botocore.config import Config
        from botocore.session import get_session

        access, secret, region = KEYS.values()
        self._store = Seaweed("ready", credentials=(access, secret))
        self._store.wait_until_ready(60)
        self.endpoint_url = self._store.endpoint_url  # it may have got another port
        self._numbers = itertools.count()
        config = Config(s3={"addressing_style": "path"}, proxies={})
        self.client: Any = get_session().create_client(
            "s3", region, endpoint_url=self.endpoint_url, aws_access_key_id=access, aws_secret_access_key=secret,
            config=config,
        )  # fmt: skip

    def fill(self, objects: Mapping[str, bytes]) -> str:
        """Make a bucket, and return its name: bucket-0 is the first of a test."""
        name = f"bucket-{next(self._numbers)}"
        self.client.create_bucket(Bucket=name)
        self.add(name, objects)
        return name

    def add(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        for key, content in objects.items():
            self.client.put_object(Bucket=bucket, Key=key, Body=content)

    def sizes(self, bucket: str) -> dict[str, int]:
        """What is in a bucket: size by key."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", ())}

    def objects(self, bucket: str) -> dict[str, bytes]:
        return {key: self.client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in self.sizes(bucket)}

    def delete(self, bucket: str, key: str) -> None:
        self.client.delete_object(Bucket=bucket, Key=key)

    def publish(self, bucket: str) -> None:
        self.client.put_bucket_acl(Bucket=bucket, ACL="public-read")

    def drop(self, bucket: str) -> None:
        for key in self.sizes(bucket):
            self.delete(bucket, key)
        self.client.delete_bucket(Bucket=bucket)

    def clear(self) -> None:
        for bucket in self.client.list_buckets()["Buckets"]:
            self.drop(bucket["Name"])
        self._numbers = itertools.count()

    def stop(self) -> None:
        self.client.close()
        self._store.stop()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    """No AWS variable, proxy or config file of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.fixture
def credentials(monkeypatch):
    """Credentials in the environment that the test's server takes."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def session_s3() -> Iterator[S3Server]:
    """The server of all tests that do not stop it."""
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(session_s3) -> Iterator[S3Server]:
    yield session_s3
    session_s3.clear()


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server of one's own, e.g. to stop it."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def png() -> Callable[..., bytes]:
    """Make a PNG of one colour: `png(red, green, blue, size=8)`."""
    from PIL import Image

    def make(red: int = 0, green: int = 0, blue: int = 0, size: int = 8) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (size, size), (red, green, blue)).save(file, "PNG")
        return file.getvalue()

    return make
