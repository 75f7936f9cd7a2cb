"""The ways to a store: addresses, certificates, credentials of machines; web servers and folders."""

from __future__ import annotations

import datetime
import http.server
import json
import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from ddp_hydra.storage import Access, Bucket, LocalFolder
from tests.integration.support.certificates import Authority
from tests.support.fault_server import serving

OBJECTS = {"photos/a/1.bin": b"one", "photos/a/b c.bin": b"two"}


@pytest.fixture
def store():
    with serving(OBJECTS) as server:
        yield server


@pytest.mark.integration
@pytest.mark.usefixtures("credentials")
def test_the_bucket_is_a_part_of_the_path_or_of_the_host(store, monkeypatch):
    assert bytes(Bucket("photos", store.url).get("a/1.bin")) == b"one"
    assert store.requests[-1][1:] == ("photos/a/1.bin", store.url.removeprefix("http://"))
    # A name that only the proxy knows, so that the host's name goes out as it is.
    monkeypatch.setenv("HTTP_PROXY", store.url)
    virtual = Bucket("photos", "http://store.test", addressing="virtual")
    store.objects |= {f"http://photos.store.test/{key}": b"three" for key in ("a/1.bin",)} | {"a/1.bin": b"three"}
    assert bytes(virtual.get("a/1.bin")) == b"three"
    assert store.requests[-1][1:] == ("a/1.bin", "photos.store.test")
    with pytest.raises(ValueError, match=r"addressing is 'host', and is path or virtual: type data\.addressing=path"):
        Bucket("photos", store.url, addressing="host")


@pytest.mark.integration
@pytest.mark.usefixtures("credentials")
def test_https_is_believed_with_a_certificate_and_only_then(monkeypatch, tmp_path):
    authority, server = certificate(tmp_path)
    with serving(OBJECTS, tls=server) as store:
        with pytest.raises(ConnectionError, match=r"certificate is not trusted.*SSL_CERT_FILE"):
            Bucket("photos", store.url, retry_timeout_s=0).get("a/1.bin")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        assert bytes(Bucket("photos", store.url).get("a/1.bin")) == b"one"


def certificate(folder: Path) -> tuple[Path, Path]:
    """Return files: of an authority, and of a server on loopback, with its key, that it signed."""
    authority = Authority(folder / "certificates", "authority")
    signed, key = authority.issue("store", "127.0.0.1")
    (folder / "server.pem").write_bytes(key.read_bytes() + signed.read_bytes())
    return authority.ca, folder / "server.pem"


class Machine(http.server.BaseHTTPRequestHandler):
    """The services that give a machine its credentials: of an instance, and for a web identity."""

    given = 0
    lasts_s = 3600

    @classmethod
    def credentials(cls) -> tuple[str, str]:
        """Name and end of the next ones."""
        cls.given += 1
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=cls.lasts_s)
        return f"machine-{cls.given}", end.strftime("%Y-%m-%dT%H:%M:%SZ")

    def do_PUT(self):
        self.say("session")

    def do_GET(self):
        if self.path.rstrip("/").endswith("security-credentials"):
            return self.say("role")
        key, end = self.credentials()
        secrets = {"AccessKeyId": key, "SecretAccessKey": "s", "Token": "t", "Expiration": end, "Code": "Success"}
        return self.say(json.dumps(secrets))

    def do_POST(self):
        key, end = self.credentials()
        self.say(
            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
            f"<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
            f"<Expiration>{end}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>"
        )

    def say(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@contextmanager
def machine(tls: Path | None = None) -> Iterator[str]:
    """Run the services on loopback, and give their URL."""
    Machine.given = 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Machine)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.integration
def test_an_instance_has_credentials_and_they_are_renewed_before_they_expire(store, monkeypatch):
    monkeypatch.setattr(Machine, "lasts_s", 2)
    with machine() as url:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
        store.access_keys = {"machine-1"}
        data = Bucket("photos", store.url)
        assert bytes(data.get("a/1.bin")) == b"one"
        store.access_keys = {f"machine-{number}" for number in range(2, 50)}
        assert bytes(data.get("a/1.bin")) == b"one"
    assert Machine.given >= 2


@pytest.mark.integration
def test_a_web_identity_has_credentials(store, monkeypatch, tmp_path):
    authority, server = certificate(tmp_path)  # the client tells its token over https only
    (tmp_path / "token").write_text("who I am")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    store.access_keys = {"machine-1"}
    with machine(server) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        assert bytes(Bucket("photos", store.url).get("a/1.bin")) == b"one"


@pytest.mark.integration
def test_a_web_server_is_read(store):
    server, key = Access().open(f"{store.url}/photos/a/b%20c.bin?signature=1")
    assert (bytes(server.get(key)), bytes(server.get_range(key, 1, 3)), server.size(key)) == (b"two", b"wo", 3)
    with pytest.raises(FileNotFoundError, match=r"/photos/none.*404"):
        server.get("photos/none")
    store.fault = lambda number, path: "403"
    with pytest.raises(PermissionError, match="may not be read") as error:
        server.get(key)
    assert "signature" not in str(error.value)
    for refused in (server.objects, server.folders):
        with pytest.raises(ValueError, match="can't be listed"):
            refused("photos")


def test_one_store_is_opened_for_all_of_a_bucket_or_host():
    access = Access()
    assert access.open("s3://photos/a/1")[0] is access.open("s3://photos/b/2")[0]
    assert access.open("http://host/a?x=1")[0] is not access.open("http://host/a?x=2")[0]
    assert [access.open(url)[1] for url in ("s3://photos/a/1", "http://host/a%20b", "file:///tmp/x%20y")] == [
        "a/1",
        "a b",
        "x y",
    ]
    layers = "local:///etc/hostname", "simplecache::s3://photos/a"
    for url in ("ipfs2://photos/a", *layers, "S3://photos/a", " s3://photos/a"):
        with pytest.raises(ValueError, match=r":// is not known.*data\.bucket="):
            access.open(url)


def test_caches_tell_stores_apart_that_share_a_url(monkeypatch):
    url = "s3://photos/a/1"
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    assert [Access(given).endpoint(url) for given in (None, "http://one")] == [None, "http://one"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://two")
    assert [Access(given).endpoint(url) for given in (None, "http://one")] == ["http://two", "http://one"]
    assert [Access("http://one").endpoint(other) for other in ("https://host/a", "gs://photos/a", "a")] == [None] * 3
    stores = [Access("http://one", client=client).open(url)[0] for client in ("obstore", "s3fs")]
    assert [store.endpoint_url for store in stores] == ["http://one"] * 2


def test_a_folder_is_listed_through_links_and_never_in_a_circle(tmp_path):
    for path in ("a/1.bin", "a/deep/2.bin"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(path.encode())
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    folder = LocalFolder(tmp_path)
    assert sorted(folder.objects("a")) == [("a/1.bin", 7), ("a/deep/2.bin", 12)]
    with pytest.raises(FileNotFoundError, match="no folder"):
        list(LocalFolder(tmp_path / "none").objects())


def test_what_is_removed_during_a_listing_hides_nothing_else(tmp_path, monkeypatch):
    for path in ("1.bin", "2.bin", "a/3.bin", "b/4.bin", "c/5.bin"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    scan = os.scandir

    class Entries(nullcontext):
        def __next__(self):
            return next(self.enter_result)

    def removing(folder):
        with scan(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        if Path(folder) == tmp_path:
            (tmp_path / "1.bin").unlink()
            (tmp_path / "b" / "4.bin").unlink()
            (tmp_path / "b").rmdir()
        return Entries(iter(entries))

    folder = LocalFolder(tmp_path)
    monkeypatch.setattr(os, "scandir", removing)
    assert sorted(key for key, _ in folder.objects()) == ["2.bin", "a/3.bin", "c/5.bin"]


def test_the_root_of_the_disk_is_a_folder(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"x")
    inside = str(tmp_path).removeprefix("/")
    assert list(LocalFolder("/").objects(inside)) == [(f"{inside}/x.bin", 1)]
