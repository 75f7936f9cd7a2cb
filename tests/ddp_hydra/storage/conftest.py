"""The S3 server and the environment of the tests in this folder."""

from tests.support.s3_server import credentials as credentials
from tests.support.s3_server import plain_environment as plain_environment
from tests.support.s3_server import png as png
from tests.support.s3_server import s3 as s3
