"""The embedded digits: real images without network or account, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from ddp_hydra.data import demo_server
from ddp_hydra.data.image_folder import S3ImageFolder
from ddp_hydra.data.images.decode import decode

ROOT = Path(__file__).parents[3]


def listens(endpoint_url: str) -> bool:
    url = urlsplit(endpoint_url)
    with socket.socket() as probe:
        return probe.connect_ex((url.hostname, url.port)) == 0


def children() -> list[psutil.Process]:
    alive = (child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE)
    return [child for child in alive if "ddp_hydra.data.demo_server" in child.cmdline()]


def test_the_digits_are_1797_of_which_a_fifth_of_each_is_for_validation():
    files = dict(demo_server.digits())
    assert len(files) == 1797
    parts = {part: Counter(key.split("/")[1] for key in files if key.startswith(part)) for part in ("train", "val")}
    assert sorted(parts["val"]) == [str(digit) for digit in range(10)]
    for digit, count in parts["val"].items():
        assert count == (count + parts["train"][digit]) // 5


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
def test_without_a_bucket_train_and_val_share_one_server_that_ends_with_them(monkeypatch):
    before = dict(os.environ)
    train = S3ImageFolder(prefix="train")
    val = S3ImageFolder(prefix="val", classes_from="train")
    try:
        assert len(train) + len(val) == 1797
        assert train.classes == val.classes == [str(digit) for digit in range(10)]
        assert len(children()) == 1
        image, target = val[0]
        assert image.shape == (3, 32, 32)
        assert target == 0
        assert dict(os.environ) == before
        train.close()
        assert len(children()) == 1
        assert val.__getitems__([1, 2])[0][1] == 0
    finally:
        train.close()
        val.close()
    assert children() == []


@pytest.mark.integration
def test_the_server_starts_within_seconds_and_listens_on_loopback_only():
    start = time.monotonic()
    endpoint = demo_server.acquire()
    try:
        assert time.monotonic() - start < 15
        (server,) = children()
        assert {connection.laddr.ip for connection in server.net_connections() if connection.status == "LISTEN"} == {
            "127.0.0.1"
        }
        assert listens(endpoint)
    finally:
        demo_server.release()
    assert not listens(endpoint)


@pytest.mark.integration
def test_a_server_that_was_killed_is_started_again():
    endpoint = demo_server.acquire()
    children()[0].kill()
    for _ in range(100):
        if not listens(endpoint):
            break
        time.sleep(0.05)
    data = S3ImageFolder(prefix="val")
    assert data[0][1] == 0
    demo_server.release()  # of the first one: the second is still in use
    assert data[1][1] == 0
    data.close()
    assert children() == []


@pytest.mark.integration
def test_it_works_where_another_data_package_is_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    assert listens(demo_server.acquire())
    demo_server.release()


@pytest.mark.integration
def test_the_server_ends_when_its_parent_is_killed():
    code = "import time; from ddp_hydra.data.demo_server import acquire; print(acquire(), flush=True); time.sleep(600)"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        endpoint = parent.stdout.readline().strip()
        assert listens(endpoint)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while listens(endpoint) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not listens(endpoint)


@pytest.mark.integration
def test_ctrl_c_reaches_the_job_and_not_its_server():
    endpoint = demo_server.acquire()
    try:
        (server,) = children()
        assert os.getpgid(server.pid) != os.getpgid(0)
        assert listens(endpoint)
    finally:
        demo_server.release()


def test_a_missing_package_says_what_to_install(monkeypatch):
    find_spec = demo_server.importlib.util.find_spec
    monkeypatch.setattr(
        demo_server.importlib.util, "find_spec", lambda name: None if name == "moto" else find_spec(name)
    )
    with pytest.raises(ModuleNotFoundError, match=r'moto.*pip install "ddp-hydra\[demo\]".*data\.bucket='):
        S3ImageFolder()


@pytest.mark.integration
def test_a_server_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(ConnectionError, match=r"did not start.*data\.bucket="):
        demo_server.acquire()
    assert children() == []


@pytest.mark.integration
def test_on_another_host_the_embedded_server_is_told_to_be_out_of_reach(monkeypatch):
    data = S3ImageFolder(prefix="val")
    data.close()
    monkeypatch.setattr("ddp_hydra.data.image_folder.socket.gethostname", lambda: "other-host")
    monkeypatch.setattr(data._store, "get", lambda *_: (_ for _ in ()).throw(ConnectionError("refused")))
    with pytest.raises(ConnectionError, match=r"other-host can't reach it.*data\.bucket="):
        data.__getitems__([0])
    data.close()
