"""What a store answers, and what the user reads."""

from __future__ import annotations

import pytest

from ddp_hydra.storage import Bucket
from tests.support.fault_server import serving

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("credentials")]


@pytest.fixture
def answering():
    """Return a bucket whose store gives one answer to everything."""
    with serving({}) as server:

        def start(status: int, code: str, **arguments) -> Bucket:
            server.fault = lambda *_: (status, code)
            return Bucket("photos", server.url, retry_timeout_s=0.2, **arguments)

        yield start


@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (403, "AccessDenied", PermissionError, r"AccessDenied.*AWS_PROFILE.*data\.anon=true"),
        (403, "SignatureDoesNotMatch", PermissionError, r"SignatureDoesNotMatch.*AWS_SECRET_ACCESS_KEY"),
        (400, "ExpiredToken", PermissionError, r"ExpiredToken.*AWS_SESSION_TOKEN"),
        (401, "", PermissionError, r"refused.*401"),
        (301, "PermanentRedirect", ConnectionError, r"another region than 'eu-west-1'.*data\.region=.*endpoint_url"),
        (
            400,
            "AuthorizationHeaderMalformed</Code><Region>us-east-2</Region><Code>",
            ConnectionError,
            r"data\.region=us-east-2",
        ),
        (404, "NoSuchBucket", FileNotFoundError, r"no bucket 'photos'.*data\.bucket="),
        (404, "", ConnectionError, r"answered .* 404.*data\.endpoint_url="),
        (503, "SlowDown", ConnectionError, r"answered .* SlowDown.*try again later"),
    ],
)
def test_an_answer_to_a_listing_becomes_a_builtin_error_that_says_what_to_type(answering, status, code, kind, said):
    with pytest.raises(kind, match=said):
        list(answering(status, code, region="eu-west-1").objects("train"))


def test_a_refused_read_is_a_permission_error(answering):
    with pytest.raises(PermissionError, match=r"AccessDenied"):
        answering(403, "AccessDenied").get("train/a/1.png")


def test_a_read_that_finds_nothing_names_the_object(answering):
    with pytest.raises(FileNotFoundError, match=r"s3://photos/train/a/1\.png"):
        answering(404, "NoSuchKey").get("train/a/1.png")


def test_a_key_with_an_empty_folder_is_named():
    """AWS has such keys, and so have most stores; SeaweedFS has none."""
    with (
        serving({"photos/train//a/1.png": b"x"}) as server,
        pytest.raises(ValueError, match=r"object 'train//a/1\.png'.*rename"),
    ):
        list(Bucket("photos", server.url).objects("train"))


def test_no_message_shows_the_secret(answering):
    with pytest.raises(PermissionError) as error:
        list(answering(403, "InvalidAccessKeyId").objects())
    assert "testing-secret" not in str(error.value)
    assert error.value.__suppress_context__
